"""One request as the engine sees it: its tokens, how far they are computed, what it holds of the arena."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridserve.replicas.engine.plan import TokenLogprobs
from hybridserve.replicas.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class Request:
    """Prompt and output are one list of tokens; KV and state cover the first `num_computed_tokens`."""

    request_id: str
    token_ids: list[int]
    """Prompt, then output."""
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    """Tokens that end it without being named by the request; empty with `ignore_eos`."""
    max_output: int
    """`max_tokens`, or less where the context ends earlier."""
    num_computed_tokens: int = 0
    """Of these, a step that is still running may compute the last."""
    num_pending_tokens: int = 0
    """Tokens that a running step draws, not in `token_ids` yet: 0 or 1 while a step is planned."""
    num_recurrent_tokens: int = 0
    """Of the computed ones, those computed as decode rows since the last prefill chunk."""
    unit_table: list[int] = field(default_factory=list)
    """The unit it holds, or nothing: a table because evacuation patches it."""
    page_table: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    num_preemptions: int = 0
    first_scheduled_time: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Known and pending ones."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known ones only."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def awaits_its_last_token(self) -> bool:
        """Nothing is left to compute: the token that is pending ends it."""
        return len(self.token_ids) + self.num_pending_tokens - self.prompt_len >= self.max_output

    @property
    def awaits_history(self) -> bool:
        """The next draw counts tokens of which one is pending."""
        return self.num_pending_tokens > 0 and self.params.has_penalty

    @property
    def is_decode(self) -> bool:
        """One token to compute and something to go on from: fit for the recurrent form."""
        computed = self.num_computed_tokens
        return computed > 0 and len(self.token_ids) + self.num_pending_tokens == computed + 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1

    def banned_token_ids(self) -> tuple[int, ...]:
        """End tokens that `min_tokens` still forbids."""
        if self.num_tokens - self.prompt_len >= self.params.min_tokens:
            return ()
        return (*self.eos_token_ids, *self.params.stop_token_ids)

    def finish_reason(self) -> tuple[str | None, int | None]:
        """(reason, stop token id) after the last of `token_ids` was generated; (None, None) to go on."""
        last = self.token_ids[-1]
        if last in self.params.stop_token_ids:
            return "stop", last
        if last in self.eos_token_ids:
            return "stop", None
        if self.num_output_tokens >= self.max_output:
            return "length", None
        return None, None


def next_prompt_tokens(request: Request, start: int, stop: int) -> Sequence[int]:
    """The prompt tokens predicted by positions start … stop-1 (none follows the prompt's last)."""
    return request.token_ids[start + 1 : min(stop + 1, request.prompt_len)]
