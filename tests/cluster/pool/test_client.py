"""The pool's client against an engine actor on this event loop, and a handle that only carries calls over."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from ray.exceptions import RayActorError

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.pool import client as client_module
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolError
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio


class Response:
    """A task in the clothes of Serve's DeploymentResponse."""

    def __init__(self, coroutine) -> None:
        self.task = asyncio.ensure_future(coroutine)

    def __await__(self):
        return asyncio.shield(self.task).__await__()

    def cancel(self) -> None:
        self.task.cancel()


class Method:
    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def remote(self, *args: object) -> Response:
        return Response(self.function(*args))


class LocalHandle:
    """Calls an engine actor as the replica does. `bus` False loses every token on the way."""

    def __init__(self, actor: EngineActor, info: EngineInfo) -> None:
        self.actor = actor
        self._info = info
        self.reply_to_nowhere = False
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.calls = 0
        self.generate = Method(self._generate)
        self.info = Method(self._get_info)

    async def _generate(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        self.calls += 1
        if self.error is not None:
            raise self.error
        if self.reply_to_nowhere:
            reply_to = ReplyTo("127.0.0.1", 1, reply_to.key)
        try:
            reply = await self.actor.generate(request, reply_to)
        except asyncio.CancelledError:
            await self.actor.abort(reply_to.key)
            raise
        await asyncio.sleep(self.delay_s)
        return reply

    async def _get_info(self) -> EngineInfo:
        return self._info


@dataclass
class Pool:
    client: HandlePoolClient
    handle: LocalHandle
    listener: BusListener
    actor: EngineActor
    outputs: list[EngineOutput] = field(default_factory=list)

    async def tokens(self, request: GenerationRequest) -> list[int]:
        self.outputs = [output async for output in self.client.generate(request)]
        return [token for output in self.outputs for token in output.token_ids]


@asynccontextmanager
async def local_pool(factory: Callable[[], object]) -> AsyncIterator[Pool]:
    actor = EngineActor(factory)
    info = await actor.start()
    assert isinstance(info, EngineInfo)
    listener = BusListener("127.0.0.1")
    await listener.start()
    handle = LocalHandle(actor, info)
    try:
        yield Pool(HandlePoolClient(handle, listener, "bus"), handle, listener, actor)
    finally:
        await actor.close()
        await listener.close()


def request(prompt: tuple[int, ...] = (5,), max_tokens: int = 10) -> GenerationRequest:
    return GenerationRequest("r", prompt, SamplingParams(max_tokens=max_tokens))


async def test_tokens_come_one_by_one_from_the_bus(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        assert await pool.tokens(request()) == list(range(5, 15))
        # a reader that is behind takes several at once
        assert 1 < len(pool.outputs) <= 10
        assert pool.outputs[-1].finish_reason == "length"
        assert pool.client.load() is not None


async def test_the_end_on_the_bus_is_enough(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        pool.handle.delay_s = 20.0
        began = time.monotonic()
        assert await pool.tokens(request()) == list(range(5, 15))
        assert time.monotonic() - began < 10.0


async def test_many_at_once(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:

        async def one(first: int) -> list[int]:
            return [t async for o in pool.client.generate(request((first,), 30)) for t in o.token_ids]

        answers = await asyncio.gather(*(one(first) for first in range(32)))
        assert answers == [list(range(first, first + 30)) for first in range(32)]


async def test_without_a_bus_everything_comes_from_the_reply(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        pool.handle.reply_to_nowhere = True
        assert await pool.tokens(request()) == list(range(5, 15))
        assert len(pool.outputs) == 1


async def test_a_connection_broken_half_way_loses_and_repeats_nothing(fake_factory) -> None:
    async with local_pool(fake_factory(step_s=0.005)) as pool:
        tokens = []
        async for output in pool.client.generate(request(max_tokens=100)):
            tokens.extend(output.token_ids)
            if len(tokens) in (10, 11, 50):
                for writer in list(pool.listener._connections):
                    writer.transport.abort()
        assert tokens == list(range(5, 105))


async def test_closing_the_iterator_frees_the_engine_within_a_step(fake_factory) -> None:
    async with local_pool(fake_factory(step_s=0.01)) as pool:
        outputs = pool.client.generate(request(max_tokens=200))
        await anext(outputs)
        await outputs.aclose()
        await asyncio.sleep(0.05)
        load = await pool.actor.load()
        assert load is not None and load.running == 0


async def test_the_load_follows_a_cancel_at_once(fake_factory) -> None:
    async with local_pool(fake_factory(step_s=0.01)) as pool:
        outputs = pool.client.generate(request(max_tokens=200))
        await anext(outputs)
        assert pool.client.load().running == 1
        await outputs.aclose()
        await asyncio.sleep(0.1)
        assert pool.client.load().running == 0


async def test_a_call_that_was_cancelled_for_us_still_sends_the_bus_cancel(fake_factory, monkeypatch) -> None:
    """Serve cancels the calls of a client that leaves; here that never reaches the engine."""
    monkeypatch.setattr(Response, "cancel", lambda self: None)
    async with local_pool(fake_factory(step_s=0.01)) as pool:
        outputs = pool.client.generate(request(max_tokens=200))
        await anext(outputs)
        [call] = pool.client._calls
        call.cancel()
        await asyncio.wait([call])
        assert (await pool.actor.load()).running == 1
        await outputs.aclose()
        await asyncio.sleep(0.05)
        assert (await pool.actor.load()).running == 0


@pytest.mark.parametrize("way", ["bus", "call"])
async def test_either_way_of_cancelling_is_enough(fake_factory, monkeypatch, way: str) -> None:
    async with local_pool(fake_factory(step_s=0.01)) as pool:
        if way == "bus":
            monkeypatch.setattr(Response, "cancel", lambda self: None)
        else:
            monkeypatch.setattr(pool.listener, "cancel", lambda stream: None)
        outputs = pool.client.generate(request(max_tokens=200))
        await anext(outputs)
        await outputs.aclose()
        await asyncio.sleep(0.05)
        load = await pool.actor.load()
        assert load is not None and load.running == 0


async def test_refusals_are_value_errors(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        with pytest.raises(ValueError, match="^prompt of 101 tokens, at most 100 fit$"):
            await pool.tokens(request((1,) * 101))
        assert await pool.tokens(request()) == list(range(5, 15))


async def test_a_dying_engine_is_a_pool_error_for_all(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        long = asyncio.create_task(pool.tokens(request(max_tokens=200)))
        await asyncio.sleep(0.05)
        with pytest.raises(PoolError, match="told to die"):
            await pool.tokens(request((666,)))
        with pytest.raises(PoolError, match="told to die"):
            await long
        with pytest.raises(PoolError, match="told to die"):
            await pool.tokens(request())
        assert "told to die" in await pool.actor.wait_for_death()


async def test_a_lost_replica_is_a_pool_error(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        pool.handle.error = RayActorError()
        with pytest.raises(PoolError, match="the pool's replica failed"):
            await pool.tokens(request())


async def test_a_golden_prompt_that_was_cancelled_is_asked_again(fake_factory, monkeypatch) -> None:
    """As Serve cancels all calls of an HTTP request whose client has gone."""

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async with local_pool(fake_factory()) as pool:
        monkeypatch.setattr(pool.client, "_call", cancelled)
        assert not await pool.client.ready()
        assert not await pool.client.ready()
        monkeypatch.undo()
        assert await pool.client.ready()


async def test_ready_answers_the_golden_prompt_once(fake_factory) -> None:
    async with local_pool(fake_factory()) as pool:
        pool.handle.error = RayActorError()
        assert not await pool.client.ready()
        pool.handle.error = None
        assert await pool.client.ready()
        # two of the actor's own golden prompt, before it counts as started
        assert (await pool.actor.load()).steps == 2 + 1
        assert await pool.client.ready()
        assert (await pool.actor.load()).steps == 2 + 1


async def test_a_client_that_is_ready_knows_the_engine_and_a_dead_one_is_no_bug(fake_factory) -> None:
    async def dead() -> EngineInfo:
        # as Serve hands it on where it calls by gRPC
        raise RuntimeError("the engine died")

    async with local_pool(fake_factory()) as pool:
        fresh = HandlePoolClient(pool.handle, pool.listener, "bus", PoolLoads())
        answered = pool.handle.info
        pool.handle.info = Method(dead)
        with pytest.raises(PoolError, match="no replica of the pool answers: .*the engine died"):
            await fresh.info()
        pool.handle.info = answered
        assert await fresh.ready()
        pool.handle.info = Method(dead)
        assert (await fresh.info()).vocab_size > 0


async def test_a_pool_that_nobody_answers_for_says_what_was_waited_for(fake_factory, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_QUICK_CALL_S", 0.05)

    async def never() -> EngineInfo:
        return await asyncio.get_running_loop().create_future()

    async with local_pool(fake_factory()) as pool:
        pool.handle.info = Method(never)
        loads = PoolLoads()
        client = HandlePoolClient(pool.handle, pool.listener, "bus", loads)
        with pytest.raises(PoolError, match="^no replica of the pool is up yet; 0.05 s were waited for one$"):
            await client.info()
        loads.set_replicas(["a", "b"])
        with pytest.raises(PoolError, match="^none of the pool's 2 replicas answered within 0.05 s$"):
            await client.info()
