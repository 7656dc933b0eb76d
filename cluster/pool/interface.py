"""What the ingress knows of a pool: the request it sends, the news it gets, and the ways it can fail.

The ingress is written against `PoolClient` alone, so that it can be tested without Ray.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from hybridserve.cluster.routing.admission import Priority, RejectReason
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.state import PoolState
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to one prompt; a client's `n` answers are n of these, `seed` already made different."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stated_max_tokens: int | None = None
    """What the client itself asked for; None when `params.max_tokens` is a default."""
    priority: Priority = "normal"
    client_request_id: str = ""
    """The `x-request-id` of the client's request, for log lines; several requests may share it."""
    output_token_ids: tuple[int, ...] = ()
    """What another replica answered before it failed; the answer goes on after it."""
    attempt: int = 0
    """Counts the replicas that the request was sent to before."""


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says of itself."""

    model_type: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    device: str


class PoolError(Exception):
    """The pool could not finish a request for a reason that is not the client's."""


class ReplicaFailed(PoolError):
    """The replica that had the request died, or could not go on with it; another one might."""


class ReaderTooSlow(PoolError):
    """The answer's tokens came faster than their client took them, and were too many to keep."""


class PoolBusy(PoolError):
    """The pool takes no more requests now; the client may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int, reason: RejectReason) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason: RejectReason = reason


class PoolClient(Protocol):
    """A pool as the ingress sees it."""

    async def info(self) -> EngineInfo:
        """Facts of the pool's engine. Raises PoolError when no replica answers."""

    async def ready(self) -> bool:
        """True once the engine has answered a prompt through all shards."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """News of the request until one is `finished`. Closing it early (`aclose`) cancels the request.

        Raises (from the first step of the iteration, before any news, unless the pool fails half-way):
            PoolBusy: too many requests are in flight.
            ValueError: the engine refused the request; the message is for the client.
            ReplicaFailed: the replica died or cannot be reached, and no other one could take its place.
            ReaderTooSlow: the news were not taken as fast as they came.
        """

    def full(self, priority: Priority) -> PoolBusy | None:
        """The refusal of any request of that priority, however small; None while there is room for one."""

    def pools(self) -> list[PoolState]:
        """The pools behind it, when it is a router; none otherwise."""

    def load(self) -> ReplicaLoad | None:
        """The replicas' last known load, or None before the first report."""

    async def refresh_load(self) -> None:
        """Bring `load` up to date where reports do not come by themselves; a failure makes it None."""
