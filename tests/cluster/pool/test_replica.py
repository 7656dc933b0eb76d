"""The replica under a real Serve: processes, both transports, cancelling, deaths and failed starts."""

import asyncio
import time
from collections.abc import Callable

import pytest

from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.pool.interface import GenerationRequest, PoolError
from hybridserve.cluster.pool.replica import EngineActorOptions, PoolReplica
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("ray_instance")]


class SpyingReplica(PoolReplica):
    """Says which modules its process has loaded."""

    async def loaded(self) -> list[str]:
        import sys

        return [name for name in ("torch", "transformers", "triton") if name in sys.modules]


def deploy(factory: Callable[[], object], name: str, replica: type[PoolReplica] = PoolReplica):
    from ray import serve

    options = EngineActorOptions(max_concurrent_requests=200, startup_timeout_s=30.0, num_cpus=0.1)
    deployment = serve.deployment(
        replica,
        name=name,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=200,
        health_check_period_s=0.5,
        graceful_shutdown_timeout_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
    )
    return serve.run(deployment.bind(factory, options), name=name, route_prefix=None)


@pytest.fixture
def undeploy():
    from ray import serve

    names: list[str] = []
    yield names.append
    for name in names:
        serve.delete(name)


def request(prompt: tuple[int, ...] = (5,), max_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest("r", prompt, SamplingParams(max_tokens=max_tokens))


async def tokens(client: HandlePoolClient, wanted: GenerationRequest) -> list[int]:
    return [token async for output in client.generate(wanted) for token in output.token_ids]


async def running(handle) -> int:
    load = await handle.load.remote()
    return load.running


async def until_idle(handle) -> None:
    deadline = time.monotonic() + 5
    while await running(handle):
        assert time.monotonic() < deadline, "the engine still runs a cancelled request"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("transport", ["bus", "handle"])
async def test_both_transports(fake_factory, undeploy, transport: str) -> None:
    name = f"transport-{transport}"
    undeploy(name)
    handle = deploy(fake_factory(step_s=0.005), name, SpyingReplica)
    listener = BusListener("127.0.0.1")
    await listener.start()
    client = HandlePoolClient(handle, listener, transport)
    assert await client.ready()
    assert (await client.info()).model_type == "fake"
    answers = await asyncio.gather(*(tokens(client, request((i,), 20)) for i in range(16)))
    assert answers == [list(range(i, i + 20)) for i in range(16)]
    with pytest.raises(ValueError, match="^prompt of 101 tokens, at most 100 fit$"):
        await tokens(client, request((1,) * 101))
    outputs = client.generate(request(max_tokens=200))
    await anext(outputs)
    assert await running(handle) == 1
    await client.refresh_load()
    assert client.load().running == 1
    await outputs.aclose()
    await until_idle(handle)
    assert await handle.loaded.remote() == []
    await listener.close()


async def test_a_cancelled_call_frees_the_engine_even_without_the_bus(
    fake_factory, undeploy, monkeypatch
) -> None:
    undeploy("cancel")
    # to its end the answer would take 12 s
    handle = deploy(fake_factory(step_s=0.05), "cancel")
    listener = BusListener("127.0.0.1")
    await listener.start()
    monkeypatch.setattr(listener, "cancel", lambda stream: None)
    outputs = HandlePoolClient(handle, listener, "bus").generate(request(max_tokens=250))
    await anext(outputs)
    await outputs.aclose()
    began = time.monotonic()
    await until_idle(handle)
    assert time.monotonic() - began < 6.0
    await listener.close()


@pytest.mark.parametrize("prompt", [(666,), (777,)], ids=["step raises", "process exits"])
async def test_a_dead_engine_fails_all_calls_and_is_replaced(fake_factory, undeploy, prompt) -> None:
    name = f"death-{prompt[0]}"
    undeploy(name)
    handle = deploy(fake_factory(step_s=0.01), name)
    listener = BusListener("127.0.0.1")
    await listener.start()
    client = HandlePoolClient(handle, listener, "bus")
    long = asyncio.create_task(tokens(client, request(max_tokens=250)))
    assert await client.ready()
    await asyncio.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(PoolError, match="died"):
        await tokens(client, request(prompt))
    with pytest.raises(PoolError, match="died"):
        await long
    assert time.monotonic() - began < 10.0
    assert not await client.ready()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert await tokens(client, request()) == list(range(5, 15))
            break
        except PoolError:
            assert time.monotonic() < deadline, "the replica was not replaced"
            await asyncio.sleep(0.2)
    assert await client.ready()
    await listener.close()


async def test_a_failed_start_says_why(fake_factory, undeploy) -> None:
    from ray import serve

    undeploy("failed")
    with pytest.raises(RuntimeError):
        deploy(fake_factory(error="model.path: no weights there"), "failed")
    [status] = serve.status().applications["failed"].deployments.values()
    assert "the engine did not start: ValueError: model.path: no weights there" in status.message
