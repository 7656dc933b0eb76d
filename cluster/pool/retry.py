"""What becomes of a request whose replica failed: sent to another one, once, or told to the client.

Plain decisions over what is known of one request; knows nothing of Ray, sockets or loads.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from hybridserve.cluster.pool.interface import GenerationRequest, PoolError, ReplicaFailed
from hybridserve.replicas.engine.plan import EngineOutput

SAME_REPLICA_PAUSE_S = 0.2
"""Before a try after one that came to the same dead replica: Serve takes a second to take it out."""


@dataclass(frozen=True)
class RetryPolicy:
    """What is done about a replica's failure.

    wait_s: how long a request may wait for another replica; 0: failures are told at once.
    resume: also requests that have sent tokens go on elsewhere.
    """

    wait_s: float = 15.0
    resume: bool = True


class Attempts:
    """One request's way over replicas. `request` is what the next one is asked for.

    Args:
        request: as it came. Where it might have to be resumed its seed is fixed, as draws depend on seed and
            position alone.
        now: seconds that only grow.
    """

    def __init__(self, request: GenerationRequest, policy: RetryPolicy, now: Callable[[], float]) -> None:
        self._policy = policy
        self._now = now
        self._token_ids: list[int] = list(request.output_token_ids)
        self._failed: set[str] = set()
        self._deadline: float | None = None
        self._retries = 0
        self.request = request
        if policy.wait_s and policy.resume and request.params.seed is None and not request.params.greedy:
            self.request = replace(request, params=replace(request.params, seed=secrets.randbits(64)))

    @property
    def retrying(self) -> bool:
        """A replica has failed, and the request went, or is to go, to another one."""
        return self._deadline is not None

    @property
    def resuming(self) -> bool:
        """The present attempt goes on after tokens of an older one."""
        return bool(self.request.output_token_ids)

    @property
    def remaining_s(self) -> float:
        """How much longer the request may wait for a replica."""
        return self._policy.wait_s if self._deadline is None else max(0.0, self._deadline - self._now())

    def took(self, output: EngineOutput) -> None:
        """News went on to the client."""
        self._token_ids.extend(output.token_ids)

    def pause_after(self, error: PoolError, replica: str | None) -> float | None:
        """Seconds to wait before the next attempt, for which `request` is ready; None: tell the client.

        replica: whose failure `error` is; one that had failed already has cost no attempt.
        """
        if not isinstance(error, ReplicaFailed) or not self._policy.wait_s:
            return None
        if self._token_ids and not self._policy.resume:
            return None
        known = replica is not None and replica in self._failed
        if self._deadline is None:
            self._deadline = self._now() + self._policy.wait_s
        elif not known:
            # that was the retry
            return None
        if replica is not None:
            self._failed.add(replica)
        if self._now() >= self._deadline:
            return None
        self._retries += 1
        self.request = replace(self.request, output_token_ids=tuple(self._token_ids), attempt=self._retries)
        return SAME_REPLICA_PAUSE_S if known else 0.0


async def begin(
    outputs: AsyncGenerator[EngineOutput, None], attempts: Attempts, has_replica: Callable[[], bool]
) -> EngineOutput:
    """A retry's first news. Once a replica has it, it may wait its turn there for as long as it takes.

    Raises:
        ReplicaFailed: no replica has taken it in time; or what `outputs` raises.
    """
    first = asyncio.ensure_future(anext(outputs))
    try:
        await asyncio.wait({first}, timeout=attempts.remaining_s)
        if first.done() or has_replica():
            return await first
        raise ReplicaFailed("no other replica was there in time to take the request")
    except ValueError as error:
        if attempts.resuming:
            # it was no bad request where it began
            raise PoolError(f"the answer could not be resumed: {error}") from error
        raise
    finally:
        first.cancel()
        await asyncio.wait({first})
