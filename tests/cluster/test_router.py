"""Admission, over a pool that answers when it is told to."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolBusy
from hybridserve.cluster.router import LengthRouter
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio


class HeldPool:
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = 0
        self.last_load: EngineLoad | None = None

    async def info(self) -> EngineInfo:
        return EngineInfo("held", 10, 10, 10, "float32", "cpu")

    async def ready(self) -> bool:
        return True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        try:
            yield EngineOutput(request.request_id, 0, (1,))
            await self.go.wait()
            yield EngineOutput(request.request_id, 1, (2,), finish_reason="length")
        except GeneratorExit:
            self.cancelled += 1
            raise

    def load(self) -> EngineLoad | None:
        return self.last_load


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingParams())


async def test_refuses_above_the_limit_and_admits_again() -> None:
    pool = HeldPool()
    router = LengthRouter(pool, max_concurrent_requests=2)
    first, second = router.generate(request("a")), router.generate(request("b"))
    await anext(first)
    await anext(second)
    with pytest.raises(PoolBusy, match="2 requests are in flight, max_concurrent_requests allows 2") as busy:
        await anext(router.generate(request("c")))
    assert busy.value.retry_after_s == 1
    await second.aclose()
    assert pool.cancelled == 1
    third = router.generate(request("d"))
    await anext(third)
    pool.go.set()
    assert (await anext(third)).finished
    assert [output.finished async for output in first] == [True]
    assert [output async for output in third] == []
    assert (await router.info()).model_type == "held"
    assert await router.ready()


@pytest.mark.parametrize(
    ("waiting_tokens", "seconds"), [(0, 1), (8000, 20), (10**9, 60)], ids=["idle", "backlog", "capped"]
)
async def test_retry_after_follows_the_backlog(waiting_tokens: int, seconds: int) -> None:
    pool = HeldPool()
    pool.last_load = EngineLoad(4, 9, waiting_tokens, 4, 4, 0, 0, 0, 10.0, 0, 5)
    router = LengthRouter(pool, max_concurrent_requests=0)
    with pytest.raises(PoolBusy) as busy:
        await anext(router.generate(request("a")))
    assert busy.value.retry_after_s == seconds
