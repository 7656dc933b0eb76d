"""What crosses between scheduler, runner and engine: frozen data, no tensors, no queues.

What is made once a sequence and step is a named tuple, which takes a fifth of a frozen dataclass' time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.sampling_params import SamplingParams

PENDING = -1
"""In `ScheduledSequence.token_ids`: the token that the step before this one draws for the same request."""


class SampleSpec(NamedTuple):
    """How to draw one sequence's next token (filled by the scheduler, read by the sampler)."""

    params: SamplingParams
    seed: int
    """64 bits; the draw depends on it and on `position` alone, so a resumed request repeats itself."""
    position: int
    """Index in the sequence of the token to draw."""
    prompt_len: int
    token_ids: Sequence[int]
    """Prompt and output so far (shared with the request, not copied): penalties count it. Complete for who
    has penalties; for others a pending token may be missing."""
    banned_token_ids: tuple[int, ...]
    """End tokens that `min_tokens` still forbids."""


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step (filled by the scheduler)."""

    request_id: str
    token_ids: Sequence[int]
    """The tokens to compute in this step; the last may be `PENDING`."""
    context_len: int
    """Tokens computed before; the first of `token_ids` has this position."""
    unit: int
    """Arena unit id, -1 for models without linear layers."""
    block_table: Sequence[int]
    """Page entries covering context_len + len(token_ids) tokens; empty for models without full attention.
    The request's own list, not a copy: read before the next step is planned."""
    sample: SampleSpec | None
    """None while the prompt is not finished."""
    recurrent_tokens: int = 0
    """Tokens that the unit took in recurrent form, one by one, since the last prefill of this sequence."""
    stagger: int = 0
    """Any number that stays the request's: what is done once in some steps is not done by all at once."""
    prompt_logprobs: int | None = None
    """How many likeliest tokens to report for each prompt position this step computes; None: none."""
    next_token_ids: Sequence[int] = ()
    """With `prompt_logprobs`: the token that follows each of `token_ids` within the prompt (one fewer than
    `token_ids` when the chunk ends the prompt)."""


@dataclass(frozen=True)
class StepPlan:
    """One step: copies first, then the forward pass of all sequences, decode rows first."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    copies: Copies = Copies()
    """Evacuated pages and units, to be copied before anything is computed."""

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token, its rank, and the likeliest tokens, best first."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Sampled(NamedTuple):
    """One sequence's result of a step (filled by the runner)."""

    token_id: int
    finite: bool = True
    """False: the logits held NaN or Inf; `token_id` means nothing."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """Results by request id (filled by the runner)."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[tuple[int, TokenLogprobs], ...]] = field(default_factory=dict)
    """For each prompt position computed: (the prompt's own token there, its log-probabilities)."""


@dataclass(frozen=True, init=False)
class EngineOutput:
    """News of one request after a step (filled by the engine; sent to whoever waits for it)."""

    request_id: str
    first_index: int
    """Index among the request's output tokens of the first of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    """Complete, with the first new token, for a request that asked for them."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_token_id: int | None = None
    """The `stop_token_ids` entry that ended it."""
    error: str | None = None
    num_preemptions: int = 0
    first_scheduled_time: float = 0.0
    """`time.monotonic` seconds."""

    def __init__(
        self,
        request_id: str,
        first_index: int,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = (),
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        num_preemptions: int = 0,
        first_scheduled_time: float = 0.0,
    ) -> None:
        # a frozen dataclass' own sets one field after another, which takes four times as long; there is one
        # of these for every token, in the engine's process and in the ingress'
        self.__dict__.update(
            request_id=request_id,
            first_index=first_index,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            error=error,
            num_preemptions=num_preemptions,
            first_scheduled_time=first_scheduled_time,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class EngineLoad:
    """How busy the engine is, for routing and metrics."""

    running: int
    waiting: int
    waiting_tokens: int
    """Tokens not yet computed, of waiting and running requests."""
    units_used: int
    units_total: int
    """Units that could be in use at once, were all free extents leased to states."""
    pages_used: int
    pages_total: int
    free_extents: int
    step_ms: float
    """Duration of the last step."""
    preemptions: int
    """Since start."""
    steps: int
