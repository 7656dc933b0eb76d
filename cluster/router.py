"""The length router: picks the pool for a request, and decides whether there is room for it.

A plain object inside each ingress replica, no hop of its own; to the ingress it is a `PoolClient` like the
pools behind it. Knows nothing of HTTP.
"""

from collections.abc import AsyncGenerator

from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolBusy, PoolClient
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput

_DEFAULT_RETRY_S = 1
_MAX_RETRY_S = 60


class LengthRouter:
    """Routes over pools (one, today) and admits.

    Args:
        pool: serves every length.
        max_concurrent_requests: in flight at once through this ingress replica; one more is refused.
    """

    def __init__(self, pool: PoolClient, max_concurrent_requests: int) -> None:
        self._pool = pool
        self._max_concurrent_requests = max_concurrent_requests
        self._in_flight = 0

    async def info(self) -> EngineInfo:
        return await self._pool.info()

    async def ready(self) -> bool:
        return await self._pool.ready()

    def load(self) -> EngineLoad | None:
        return self._pool.load()

    async def refresh_load(self) -> None:
        await self._pool.refresh_load()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """As the pool's own; raises PoolBusy at the first step when too many requests are in flight."""
        if self._in_flight >= self._max_concurrent_requests:
            raise PoolBusy(
                f"{self._in_flight} requests are in flight, "
                f"max_concurrent_requests allows {self._max_concurrent_requests}",
                self._retry_after_s(),
            )
        self._in_flight += 1
        outputs = self._pool.generate(request)
        try:
            async for output in outputs:
                yield output
        finally:
            self._in_flight -= 1
            await outputs.aclose()

    def _retry_after_s(self) -> int:
        """Seconds until the backlog should have gone, at the pace of the last step."""
        load = self._pool.load()
        if load is None or load.running == 0:
            return _DEFAULT_RETRY_S
        steps = load.waiting_tokens / load.running
        return min(max(_DEFAULT_RETRY_S, round(steps * load.step_ms / 1000)), _MAX_RETRY_S)
