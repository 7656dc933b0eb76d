"""Our request router and autoscaling policy inside a real Serve, over engines without a model."""

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest

from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.pool.interface import GenerationRequest
from hybridserve.cluster.pool.replica import EngineActorOptions, PoolReplica
from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.registry import pool_loads
from hybridserve.cluster.settings_reading import parse_settings
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("ray_instance")]


@pytest.fixture
def deploy():
    """deploy(name, factory, replicas, **autoscaling): a pool's handle."""
    from ray import serve

    from hybridserve.cluster.serve_alpha.autoscaling import replica_options
    from hybridserve.cluster.serve_alpha.request_router import router_config

    names: list[str] = []

    def run(name: str, factory: Callable, replicas: object, **autoscaling: object):
        settings = parse_settings(
            {
                "model": {"path": "none"},
                "serving": {"token_budget": 2000},
                "autoscaling": autoscaling,
                "pools": [{"name": "p", "replicas": replicas}],
            }
        )
        [spec] = settings.pool_specs()
        deployment = serve.deployment(
            PoolReplica,
            name="pool-p",
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=200,
            health_check_period_s=0.5,
            graceful_shutdown_timeout_s=20.0,
            graceful_shutdown_wait_loop_s=0.1,
            request_router_config=router_config("p"),
            **replica_options(settings, spec, "cpu"),
        )
        names.append(name)
        options = EngineActorOptions(200, startup_timeout_s=30.0, num_cpus=0.1)
        return serve.run(deployment.bind(factory, options), name=name, route_prefix=None)

    yield run
    for name in names:
        serve.delete(name)


async def listening(handle, name: str):
    """The pool's client, and the loads that Serve's router in this process shares with it."""
    loads = pool_loads(name, "p")
    listener = BusListener("127.0.0.1", loads)
    await listener.start()
    return HandlePoolClient(handle, listener, "bus", loads), loads, listener


async def answer(client, loads, name: str, max_tokens: int) -> int:
    """Tokens that came; as the length router does."""
    loads.book(name, Cost(1, max_tokens))
    count = 0
    try:
        async for output in client.generate(
            GenerationRequest(name, (5,), SamplingParams(max_tokens=max_tokens), max_tokens)
        ):
            count += len(output.token_ids)
            loads.progress(name, len(output.token_ids))
    finally:
        loads.end(name)
    return count


async def until(holds: Callable[[], bool], seen: Callable[[], object], limit_s: float = 60.0) -> None:
    """seen: what to tell when it does not hold in time."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, seen()
        await asyncio.sleep(0.02)


async def test_replicas_get_tokens_alike_and_answers_to_one_http_request_all_come(
    fake_factory, deploy
) -> None:
    from ray.serve import context

    handle = deploy("router", fake_factory(step_s=0.02), 2)
    client, loads, listener = await listening(handle, "router")
    assert await client.ready()
    # as within one HTTP request, whose calls all have the same id inside Serve
    context._serve_request_context.set(context._RequestContext(_internal_request_id="one"))

    def running() -> list[int]:
        return sorted(load.running for load in loads.reports().values())

    big = asyncio.create_task(answer(client, loads, "big", 240))
    await until(lambda: 1 in running(), running)
    small = [asyncio.create_task(answer(client, loads, f"s{i}", 50)) for i in range(4)]
    await until(lambda: running() == [1, 4], running)
    assert await asyncio.gather(big, *small) == [240, 50, 50, 50, 50]
    assert len(loads.replicas()) == 2
    await until(lambda: loads.totals().outstanding == 0, loads.totals)
    assert set(loads.reports()) == set(loads.replicas())
    await listener.close()


async def test_a_pool_grows_from_nothing_and_a_stream_outlives_its_shrinking(fake_factory, deploy) -> None:
    handle = deploy(
        "scaling",
        fake_factory(step_s=0.1),
        {"min": 0, "max": 2},
        target_load=0.2,
        scale_up_after_s=0.2,
        scale_down_after_s=2.0,
    )
    client, loads, listener = await listening(handle, "scaling")
    assert await answer(client, loads, "first", 5) == 5
    assert len(loads.replicas()) == 1

    async def keep_busy(number: int) -> None:
        for turn in itertools.count():
            assert await answer(client, loads, f"f{number}-{turn}", 200) == 200

    # 400 outstanding tokens a replica are wanted: there are up to 800, then 300, one answer on each replica
    flood = [asyncio.create_task(keep_busy(i)) for i in range(4)]
    await until(lambda: len(loads.replicas()) == 2, loads.replicas)
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)
    late = [asyncio.create_task(answer(client, loads, f"l{i}", 150)) for i in range(2)]
    # they go by the bus, so that Serve counts no request of the replica that it stops
    await until(lambda: not client._calls, lambda: client._calls)
    await until(lambda: len(loads.replicas()) == 1, loads.replicas)
    assert not any(task.done() for task in late)
    assert await asyncio.gather(*late) == [150] * 2
    await until(lambda: not loads.replicas(), loads.replicas)
    await listener.close()
