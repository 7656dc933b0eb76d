"""Routing and admission over pools that answer when they are told to."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolBusy, PoolError
from hybridserve.cluster.routing import length_router
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.routing.state import PoolState
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio


class HeldPool:
    """One replica that gives a token, and the last one when `go` is set."""

    def __init__(self, loads: PoolLoads, context: int = 1000) -> None:
        self.loads = loads
        self.context = context
        self.go = asyncio.Event()
        self.cancelled = 0
        self.requests: list[str] = []
        self.is_up = True
        loads.set_replicas(["r"])

    async def info(self) -> EngineInfo:
        if not self.is_up:
            raise PoolError("nobody answers")
        return EngineInfo("held", 10, self.context, 10, "float32", "cpu")

    async def ready(self) -> bool:
        return self.is_up

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request.request_id)
        assert self.loads.choose(["r"], request.request_id) == ["r"]
        try:
            yield EngineOutput(request.request_id, 0)
            yield EngineOutput(request.request_id, 0, (1,))
            await self.go.wait()
            yield EngineOutput(request.request_id, 1, (2,), finish_reason="length")
        except GeneratorExit:
            self.cancelled += 1
            raise

    def pools(self) -> list[PoolState]:
        return []

    def load(self) -> ReplicaLoad | None:
        return None

    async def refresh_load(self) -> None:
        """Nothing to ask."""


def spec(name: str, low: int, high: int | None, borrows: tuple[str, ...] = (), **limits: float) -> PoolSpec:
    given = {
        "max_concurrent_requests": 4,
        "token_budget": 1000,
        "queue_deadline_s": 10.0,
        "normal_priority_share": 0.8,
        "low_priority_share": 0.5,
        **limits,
    }
    return PoolSpec(name, low, high, 1, ReplicaRange(1, 1), borrows, PoolLimits(**given))


def routed(pool: PoolSpec, num_ingress: int = 1, context: int = 1000) -> RoutedPool:
    loads = PoolLoads()
    return RoutedPool(pool, HeldPool(loads, context), loads, Admission(pool.name, pool.limits, num_ingress))


@pytest.fixture
def pools() -> list[RoutedPool]:
    return [
        routed(spec("short", 0, 100, ("long",))),
        routed(spec("middle", 100, 300), context=700),
        routed(spec("long", 300, None, token_budget=10_000)),
    ]


@pytest.fixture
def router(pools: list[RoutedPool]) -> LengthRouter:
    return LengthRouter(pools)


def request(name: str, prompt: int, stated: int | None = None, priority: str = "normal") -> GenerationRequest:
    params = SamplingParams(max_tokens=stated or 500)
    return GenerationRequest(name, (1,) * prompt, params, stated, priority)


async def begin(router: LengthRouter, *args: object, **options: object) -> AsyncGenerator:
    """A stream whose first token has come."""
    outputs = router.generate(request(*args, **options))
    while not (await anext(outputs)).token_ids:
        continue
    return outputs


def decisions(router: LengthRouter) -> dict[str, dict[str, int]]:
    return {state.spec.name: dict(state.decisions) for state in router.pools()}


@pytest.mark.parametrize(
    ("prompt", "stated", "pool"),
    [
        (1, None, "short"),
        (100, None, "short"),
        (101, None, "middle"),
        (50, 50, "short"),
        (50, 51, "middle"),
        (300, None, "middle"),
        (301, None, "long"),
        (1, 400, "long"),
    ],
)
async def test_the_bucket_is_of_the_prompt_and_a_stated_max_tokens(
    router: LengthRouter, prompt: int, stated: int | None, pool: str
) -> None:
    await begin(router, "a", prompt, stated)
    assert decisions(router) == {"short": {}, "middle": {}, "long": {}} | {pool: {"own": 1}}


async def test_a_full_short_pool_borrows_an_idle_longer_one_and_never_the_reverse(
    router: LengthRouter, pools: list[RoutedPool]
) -> None:
    streams = [await begin(router, f"s{i}", 90) for i in range(3)]
    # an expected answer of 256 tokens each; the prompt is done, and a token of the answer
    assert decisions(router)["short"] == {"own": 1}
    assert decisions(router)["long"] == {"borrowed": 2}
    assert pools[2].client.requests == ["s1", "s2"]
    for stream in streams:
        await stream.aclose()
    blocked = [await begin(router, f"l{i}", 9_000 if i == 0 else 400) for i in range(2)]
    with pytest.raises(PoolBusy) as busy:
        await begin(router, "l2", 9_990)
    assert busy.value.reason == "token_budget"
    assert pools[0].loads.totals().own_requests == pools[1].loads.totals().own_requests == 0
    assert len(blocked) == 2


async def test_a_busy_lender_is_left_alone(router: LengthRouter) -> None:
    await begin(router, "l", 301, 1500)
    await begin(router, "a", 90)
    await begin(router, "b", 90)
    with pytest.raises(PoolBusy, match="pool short: "):
        await begin(router, "c", 90)
    assert decisions(router) == {"short": {"own": 2}, "middle": {}, "long": {"own": 1}}


async def test_what_ended_or_was_cancelled_makes_room(router: LengthRouter, pools: list[RoutedPool]) -> None:
    streams = [await begin(router, f"m{i}", 101, 10) for i in range(4)]
    with pytest.raises(PoolBusy, match="4 requests are in flight, max_concurrent_requests allows 4") as busy:
        await begin(router, "m4", 101, 10)
    assert (busy.value.reason, busy.value.retry_after_s) == ("concurrent_requests", 1)
    await streams[0].aclose()
    assert pools[1].client.cancelled == 1
    streams[0] = await begin(router, "m5", 101, 10)
    pools[1].client.go.set()
    for stream in streams:
        assert [output.finished async for output in stream] == [True]
    totals = pools[1].loads.totals()
    assert (totals.own_requests, totals.own_outstanding, totals.outstanding) == (0, 0, 0)
    [state] = [state for state in router.pools() if state.spec.name == "middle"]
    assert state.rejections == {("concurrent_requests", "normal"): 1}


async def test_priorities_share_the_budget(router: LengthRouter) -> None:
    await begin(router, "a", 110, 150, priority="low")
    assert decisions(router)["middle"] == {"own": 1}
    with pytest.raises(PoolBusy, match="priority low may use of token_budget 1000") as busy:
        await begin(router, "b", 150, 250 - 100, priority="low")
        await begin(router, "c", 200, 100, priority="low")
    assert busy.value.reason == "priority_share"
    await begin(router, "d", 200, 100, priority="high")


async def test_what_the_pools_say_together(router: LengthRouter, pools: list[RoutedPool]) -> None:
    assert (await router.info()).max_model_len == 700
    assert await router.ready()
    pools[0].client.is_up = False
    assert not await router.ready()
    with pytest.raises(PoolError, match="nobody answers"):
        await router.info()


async def test_what_engines_are_is_asked_until_all_that_last_have_told(monkeypatch) -> None:
    monkeypatch.setattr(length_router, "_LEARN_S", 0.01)
    empty = routed(PoolSpec("b", 9, None, 1, ReplicaRange(0, 2), (), spec("b", 9, None).limits))
    late = routed(spec("a", 0, 9))
    empty.client.is_up = late.client.is_up = False
    learning = asyncio.create_task(LengthRouter([late, empty]).learn())
    await asyncio.sleep(0.05)
    assert not learning.done()
    late.client.is_up = True
    # a call to the other would start a replica of it
    await asyncio.wait_for(learning, 5)


async def test_a_pool_that_may_be_empty_need_not_answer() -> None:
    empty = routed(PoolSpec("b", 9, None, 1, ReplicaRange(0, 2), (), spec("b", 9, None).limits))
    empty.client.is_up = False
    router = LengthRouter([routed(spec("a", 0, 9)), empty])
    assert await router.ready()
    assert (await router.info()).max_model_len == 1000
    with pytest.raises(PoolError, match="nobody answers"):
        await LengthRouter([empty]).info()
