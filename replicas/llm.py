"""The offline API: a model and its engine in this process. Named as vLLM's: a script ports by its import.

Owns prompts in, whole answers out, in order. Knows nothing of scheduling or memory (the engine does) or of
Ray.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.generation import TextListener, answer_prompts, naming_prompt
from hybridserve.replicas.models.config import is_shape_file, load_generation_defaults
from hybridserve.replicas.outputs import RequestOutput
from hybridserve.replicas.progress import answer_progress, weight_progress
from hybridserve.replicas.prompts import Prompt, TokenizedPrompt, as_prompt_list, tokenize_prompt
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.no_tokenizer import NoTokenizer
from hybridserve.replicas.text.tokenizer import Tokenizer

__all__ = ["LLM", "SamplingParams"]

Conversation = Sequence[Mapping[str, object]]


class LLM:
    """A model that answers prompts.

    Not thread-safe. After an interrupt (Ctrl-C) the outstanding requests are gone and the object can be used
    again.
    """

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
        device: str = "auto",
        tensor_parallel_size: int = 1,
        linear_attention_split: str = "heads",
        moe_split: str = "intermediate",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        cache_memory_bytes: int | None = None,
        page_size: int = 16,
        load_format: str = "auto",
        enforce_eager: bool = False,
        seed: int = 0,
        hf_overrides: Mapping[str, object] | None = None,
        num_threads: int | None = None,
        state_dtype: str = "float32",
        show_progress: bool = True,
        skip_tokenizer_init: bool = False,
    ) -> None:
        """Load the model; the options are `EngineConfig`'s, `show_progress` draws a bar while weights load.

        With a `tensor_parallel_size` above 1 this process computes one part of the model and starts others of
        this machine for the rest, on GPUs one each; see `shutdown`.

        With `skip_tokenizer_init`, and always for a shape without weights, there is no tokenizer: prompts are
        token ids, and outputs have ids and no text.

        Raises:
            ValueError: an option is out of its bounds, or the checkpoint is missing, broken or unsupported.
            RankFailure: another rank's process could not be started; names it and says why.
        """
        config = EngineConfig(
            model=str(model),
            dtype=dtype,
            state_dtype=state_dtype,
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            linear_attention_split=linear_attention_split,
            moe_split=moe_split,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            cache_memory_bytes=cache_memory_bytes,
            page_size=page_size,
            load_format=load_format,
            enforce_eager=enforce_eager,
            seed=seed,
            num_threads=num_threads,
            hf_overrides=dict(hf_overrides or {}),
        )
        # first what is quick to fail
        without = skip_tokenizer_init or is_shape_file(config.model)
        tokenizer = NoTokenizer(config.model) if without else Tokenizer.load(config.model)
        default_params = default_sampling_params(load_generation_defaults(config.model))
        with weight_progress() if show_progress else nullcontext() as progress:
            engine = build_engine(config, progress=progress)
        self._assemble(engine, tokenizer, default_params)

    @classmethod
    def from_engine(
        cls, engine: Engine, tokenizer: Tokenizer, default_params: SamplingParams | None = None
    ) -> "LLM":
        """The same around an engine that is already there."""
        llm = cls.__new__(cls)
        llm._assemble(engine, tokenizer, default_params or SamplingParams())
        return llm

    def _assemble(self, engine: Engine, tokenizer: Tokenizer, default_params: SamplingParams) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._default_params = default_params
        self._request_ids = itertools.count()

    def shutdown(self) -> None:
        """End the processes of other ranks, if there are any; it cannot answer prompts any more.

        This also happens when the object is not used any more, and when the interpreter ends.
        """
        self._engine.shutdown()

    @property
    def engine(self) -> Engine:
        """For its limits and its load; requests go through `generate`."""
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling_params: the checkpoint's `generation_config.json`."""
        return self._default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_text: TextListener | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs come in the prompts' order.

        An answer that the engine had to give up has finish_reason "error" and the reason in its stop_reason;
        the others are not affected.

        Args:
            prompts: a string, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of those.
            sampling_params: one for all, or one a prompt; None: `get_default_sampling_params()`.
            use_tqdm: draw a progress bar on stderr.
            on_text: called with (prompt's index, answer's index, text) as the text comes.

        Raises:
            ValueError: a prompt or its parameters cannot be served; the message names the prompt's index, and
                nothing has run.
            RankFailure: a process of another rank died or is stuck; names it. The object is of no use then.
        """
        listed = as_prompt_list(prompts)
        params = self._params_list(sampling_params, len(listed))
        tokenized = []
        for index, prompt in enumerate(listed):
            with naming_prompt(index):
                tokenized.append(tokenize_prompt(prompt, self._tokenizer))
        return self._answer(tokenized, params, use_tqdm, on_text)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        on_text: TextListener | None = None,
    ) -> list[RequestOutput]:
        """`generate` for conversations, which the model's chat template turns into prompts.

        Args:
            messages: one conversation (a list of dicts with "role" and "content"), or a list of them.
            sampling_params: as for `generate`.
            use_tqdm: draw a progress bar on stderr.
            add_generation_prompt: end each prompt with the opening of the assistant's turn.
            chat_template_kwargs: further names for the template.
            on_text: as for `generate`.

        Raises:
            ValueError: as for `generate`, or the template refuses a conversation.
        """
        one = bool(messages) and all(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if one else list(messages)
        params = self._params_list(sampling_params, len(conversations))
        variables = dict(chat_template_kwargs or {})
        tokenized = []
        for index, conversation in enumerate(conversations):
            with naming_prompt(index):
                tokenized.append(self._tokenize_chat(conversation, add_generation_prompt, variables))
        return self._answer(tokenized, params, use_tqdm, on_text)

    def _tokenize_chat(
        self, messages: Conversation, add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> TokenizedPrompt:
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError(f"a conversation is a list of one message or more, got {messages!r}")
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))

    def _params_list(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """One SamplingParams a prompt."""
        if sampling_params is None:
            sampling_params = self._default_params
        if isinstance(sampling_params, SamplingParams):
            self._check_stops(sampling_params)
            return [sampling_params] * num_prompts
        params = list(sampling_params)
        if len(params) != num_prompts:
            raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts")
        for index, entry in enumerate(params):
            if not isinstance(entry, SamplingParams):
                raise ValueError(
                    f"sampling_params[{index}] must be SamplingParams, got {type(entry).__name__}"
                )
            self._check_stops(entry)
        return params

    def _check_stops(self, params: SamplingParams) -> None:
        if params.stop and not self._tokenizer.has_text:
            raise ValueError(
                f"stop is {list(params.stop)}, but without a tokenizer there is no text to find it in; "
                "use stop_token_ids"
            )

    def _answer(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        on_text: TextListener | None,
    ) -> list[RequestOutput]:
        total = sum(p.n for p in params)
        with answer_progress(total) if use_tqdm and total else nullcontext() as progress:
            return answer_prompts(
                self._engine, self._tokenizer, prompts, params, self._request_ids, progress, on_text
            )


def default_sampling_params(defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling that a checkpoint's `generation_config.json` asks for (see `load_generation_defaults`).

    Raises:
        ValueError: one of its values is out of bounds.
    """
    own = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    fields = {name: defaults[name] for name in own if name in defaults}
    if "max_new_tokens" in defaults:
        fields["max_tokens"] = defaults["max_new_tokens"]
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error
