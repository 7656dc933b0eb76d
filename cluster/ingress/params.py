"""From a request's fields to `SamplingParams`: defaults filled in, ids and lengths held against the model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hybridserve.cluster.ingress.errors import from_bounds, invalid
from hybridserve.cluster.ingress.protocol import SamplingFields
from hybridserve.cluster.pool.interface import EngineInfo
from hybridserve.replicas.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions."""

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_CARRIED = (
    *_DEFAULTED,
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class GenerationDefaults:
    """What a checkpoint's `generation_config.json` says for clients that say nothing.

    sampling: by `SamplingParams`' names. max_new_tokens: None when the file has none.
    """

    def __init__(self, generation_config: Mapping[str, object]) -> None:
        """
        Raises:
            ValueError: a value is out of its bounds.
        """
        known = {name: value for name in _DEFAULTED if (value := generation_config.get(name)) is not None}
        max_new_tokens = generation_config.get("max_new_tokens")
        try:
            SamplingParams(**known, max_tokens=max_new_tokens)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from None
        self.sampling = known
        self.max_new_tokens: int | None = max_new_tokens


def read_params(
    fields: SamplingFields,
    defaults: GenerationDefaults,
    info: EngineInfo,
    *,
    n: int | None = None,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The request's sampling, checked; `max_tokens` None means that the client left it open.

    aliases: client's names of fields that reach here under another.

    Raises:
        ApiError: 400, naming the field and the value.
    """
    given = {name: value for name in _CARRIED if (value := getattr(fields, name)) is not None}
    try:
        params = SamplingParams(
            **{**defaults.sampling, **given},
            n=1 if n is None else n,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except ValueError as error:
        raise from_bounds(error, aliases) from None
    check_token_ids("logit_bias", params.logit_bias, info)
    check_token_ids("stop_token_ids", params.stop_token_ids, info)
    # beyond the vocabulary it filters nothing, and an engine's integers are of 64 bits
    return params if params.top_k <= info.vocab_size else replace(params, top_k=0)


def check_token_ids(param: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            shown = str(token_id)[:40]
            raise invalid(
                param, f"{param} has token id {shown}, outside the vocabulary of {info.vocab_size} tokens"
            )


def fit_to_context(
    params: SamplingParams,
    prompt_len: int,
    info: EngineInfo,
    *,
    default: int | None,
    prompt_param: str,
    max_tokens_param: str = "max_tokens",
) -> SamplingParams:
    """`params` of one prompt, with `max_tokens` settled.

    default: for a client that sent no `max_tokens`; None is what remains of the context.
    prompt_param, max_tokens_param: the client's names of the two.

    Raises:
        ApiError: 400 with code context_length_exceeded and the numbers.
    """
    limit = info.max_model_len
    room = limit - prompt_len
    if room < 1:
        raise invalid(
            prompt_param,
            f"{prompt_param} has {prompt_len} tokens; a context of {limit} tokens must hold it and one more",
            code="context_length_exceeded",
        )
    if params.max_tokens is None:
        max_tokens = room if default is None else min(default, room)
        try:
            return replace(params, max_tokens=max_tokens)
        except ValueError as error:
            raise from_bounds(error) from None
    if params.max_tokens > room:
        raise invalid(
            max_tokens_param,
            f"{max_tokens_param} {params.max_tokens} and the prompt's {prompt_len} tokens are together more "
            f"than the context of {limit} tokens",
            code="context_length_exceeded",
        )
    return params
