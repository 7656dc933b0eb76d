"""What a caller of the offline API gets back. Names and fields are vLLM's."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int
    """1 for the likeliest token of the position."""
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on `time.monotonic`'s clock."""

    arrival_time: float
    first_scheduled_time: float
    first_token_time: float
    finished_time: float
    num_preemptions: int = 0


@dataclass
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a generated token: the chosen token and the likeliest `SamplingParams.logprobs`."""
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for an end-of-sequence token."""


@dataclass
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token; the first is None (nothing predicts it)."""
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    finished: bool = True
