"""Requests that go to a connected engine by the bus: the client, the bus and an engine's actor, no calls."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from hybridserve.cluster.bus import frames, listener, sender
from hybridserve.cluster.bus.frames import FrameError, Hello, Passes
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.sender import BusSender
from hybridserve.cluster.bus.submission import Submission, pack_submission, unpack_order
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolError, ReplicaFailed
from hybridserve.cluster.pool.unheard import Unheard
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.replicas.sampling_params import SamplingParams

from .test_client import LocalHandle, Pool, request

pytestmark = pytest.mark.anyio

FIRST_TEN = list(range(5, 15))


@asynccontextmanager
async def connected(factory: Callable[[], object]) -> AsyncIterator[Pool]:
    """A pool whose engine has been called once; more calls fail."""
    actor = EngineActor(factory)
    info = await actor.start("a")
    assert isinstance(info, EngineInfo)
    loads = PoolLoads()
    loads.set_replicas(["a"])
    one = BusListener("127.0.0.1", loads)
    await one.start()
    handle = LocalHandle(actor, info)
    pool = Pool(HandlePoolClient(handle, one, "bus", loads), handle, one, actor)
    try:
        assert await pool.tokens(request()) == FIRST_TEN
        handle.error = AssertionError("a call, where the bus should do")
        yield pool
    finally:
        await actor.close()
        await one.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def until_nothing_is_kept(pool: Pool) -> None:
    async with asyncio.timeout(20):
        while await pool.actor.num_requests():
            await asyncio.sleep(0.002)
    assert pool.listener.num_streams == 0
    assert all(channel.streams == 0 for channel in pool.actor._sender._channels.values())


async def test_one_call_and_then_none(fake_factory) -> None:
    async with connected(fake_factory()) as pool:
        for first in range(5):
            assert await pool.tokens(request((first,))) == list(range(first, first + 10))
        await until_nothing_is_kept(pool)


async def test_many_at_once(fake_factory) -> None:
    async with connected(fake_factory()) as pool:

        async def one(first: int) -> list[int]:
            return [t async for o in pool.client.generate(request((first,), 30)) for t in o.token_ids]

        answers = await asyncio.gather(*(one(first) for first in range(32)))
        assert answers == [list(range(first, first + 30)) for first in range(32)]
        await until_nothing_is_kept(pool)


async def test_other_ingresses_hear_of_a_request_while_the_step_still_runs(fake_factory) -> None:
    """Or they would all choose the replica that has just been given a long prompt."""
    engines, goes_on = [], threading.Event()

    def build() -> object:
        built = fake_factory()()
        engines.append(built.engine)
        return built

    async with connected(build) as pool:
        loads = PoolLoads()
        loads.set_replicas(["a"])
        other = BusListener("127.0.0.1", loads)
        await other.start()
        # nor by the report that a silent connection makes now and then
        pool.actor._sender._idle_s = 600.0
        handle = LocalHandle(pool.actor, await pool.client.info())
        assert await Pool(HandlePoolClient(handle, other, "bus", loads), handle, other, pool.actor).tokens(
            request()
        )
        await until(lambda: loads.outstanding("a") == 0, "idle")
        step = engines[0].step
        engines[0].step = lambda: goes_on.wait(60) and step()
        try:
            answer = asyncio.ensure_future(pool.tokens(request((7,))))
            await until(lambda: loads.outstanding("a") > 0, "a load with the request")
            assert not answer.done()
        finally:
            goes_on.set()
        assert await answer == list(range(7, 17))
        await other.close()


async def test_what_a_frame_may_not_hold_is_called(fake_factory) -> None:
    async with connected(fake_factory()) as pool:
        pool.handle.error = None
        asked = GenerationRequest("r", (5,), SamplingParams(max_tokens=10, logprobs=1))
        assert await pool.tokens(asked) == FIRST_TEN
        assert pool.handle.calls == 2


async def test_a_refusal_is_a_value_error_and_hurts_nobody(fake_factory) -> None:
    async with connected(fake_factory()) as pool:
        with pytest.raises(ValueError, match="^prompt of 101 tokens, at most 100 fit$"):
            await pool.tokens(request((1,) * 101))
        assert await pool.tokens(request()) == FIRST_TEN
        await until_nothing_is_kept(pool)


async def test_a_dying_engine_tells_all(fake_factory) -> None:
    async with connected(fake_factory()) as pool:
        long = asyncio.create_task(pool.tokens(request(max_tokens=200)))
        await asyncio.sleep(0.05)
        with pytest.raises(ReplicaFailed, match="told to die"):
            await pool.tokens(request((666,)))
        with pytest.raises(ReplicaFailed, match="told to die"):
            await long
        with pytest.raises(ReplicaFailed, match="told to die"):
            await pool.tokens(request())
        await until_nothing_is_kept(pool)


async def test_a_connection_that_breaks_often_loses_and_repeats_nothing(fake_factory, monkeypatch) -> None:
    monkeypatch.setattr(listener, "_RETURN_S", 20.0)
    async with connected(fake_factory(step_s=0.005)) as pool:
        tokens = []
        async for output in pool.client.generate(request(max_tokens=100)):
            tokens.extend(output.token_ids)
            if len(tokens) in (10, 11, 50, 99):
                for writer in list(pool.listener._connections):
                    writer.transport.abort()
        assert tokens == list(range(5, 105))
        await until_nothing_is_kept(pool)


@pytest.mark.parametrize("prompt", [(5,), (1,) * 101], ids=["an answer", "a refusal"])
async def test_what_ends_while_the_connection_is_broken_is_said_after(
    fake_factory, monkeypatch, prompt: tuple[int, ...]
) -> None:
    monkeypatch.setattr(listener, "_RETURN_S", 20.0)
    allowed = asyncio.Event()
    dial = asyncio.open_connection

    async def dial_later(*args: object, **kwargs: object) -> object:
        await allowed.wait()
        return await dial(*args, **kwargs)

    async with connected(fake_factory(step_s=0.01)) as pool:
        # the engine has the request, and the connection ends before it can say anything
        monkeypatch.setattr(sender.asyncio, "open_connection", dial_later)
        submission = pool.actor.on_submission
        [channel] = pool.actor._sender._channels.values()

        def cut(*args: object) -> None:
            submission(*args)
            [writer] = pool.listener._connections
            writer.transport.abort()
            channel._lose_backlog()

        monkeypatch.setattr(channel, "_on_submission", cut)
        task = asyncio.create_task(pool.tokens(request(prompt)))
        await until(lambda: len(pool.actor._unheard) == 1, "the end")
        assert not task.done()
        allowed.set()
        if prompt == (5,):
            assert await task == FIRST_TEN
        else:
            with pytest.raises(ValueError, match="prompt of 101 tokens"):
                await task
        await until_nothing_is_kept(pool)


async def test_a_backlog_that_was_lost_is_said_again_by_the_same_connection(fake_factory) -> None:
    async with connected(fake_factory(step_s=0.005)) as pool:
        [channel] = pool.actor._sender._channels.values()
        tokens = []
        async for output in pool.client.generate(request(max_tokens=60)):
            tokens.extend(output.token_ids)
            channel._lose_backlog()
        assert tokens == list(range(5, 65))
        assert channel.epoch > 2
        await until_nothing_is_kept(pool)


async def test_closing_the_iterator_frees_the_engine(fake_factory) -> None:
    async with connected(fake_factory(step_s=0.01)) as pool:
        outputs = pool.client.generate(request(max_tokens=200))
        await anext(outputs)
        await outputs.aclose()
        await until_nothing_is_kept(pool)
        await until(lambda: pool.client.load().running == 0, "the engine to be free")


async def test_a_cancel_that_met_a_broken_connection_is_repeated(fake_factory, monkeypatch) -> None:
    async with connected(fake_factory(step_s=0.01)) as pool:
        outputs = pool.client.generate(request(max_tokens=2000))
        await anext(outputs)
        monkeypatch.setattr(pool.listener, "cancel", lambda stream: None)
        await outputs.aclose()
        for writer in list(pool.listener._connections):
            writer.transport.abort()
        await until_nothing_is_kept(pool)


async def test_an_engine_that_does_not_come_back_has_failed_its_requests(fake_factory) -> None:
    async with connected(fake_factory(step_s=0.01)) as pool:
        task = asyncio.create_task(pool.tokens(request(max_tokens=200)))
        await until(lambda: pool.listener.num_streams == 1, "the request")
        await asyncio.sleep(0.05)
        await pool.actor._sender.close()
        async with asyncio.timeout(10):
            with pytest.raises(PoolError, match="the engine died or cannot be reached: its connection ended"):
                await task
        # and the next one is called
        pool.handle.error = None
        assert await pool.tokens(request()) == FIRST_TEN


async def test_who_does_not_know_the_pass_gets_no_request(fake_factory, caplog) -> None:
    caplog.set_level(logging.WARNING)
    async with connected(fake_factory()) as pool:
        reader, writer = await asyncio.open_connection(*pool.listener.open_stream().reply_to.address)
        writer.write(frames.pack_hello(Hello(b"?" * 16, "a")))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert "a hello without the pass" in caplog.text
        assert await pool.tokens(request()) == FIRST_TEN


@pytest.mark.parametrize("passes", [None, Passes(b"e" * 16, b"i" * 16)], ids=["no pass", "another pass"])
async def test_who_does_not_know_the_pass_can_send_none(passes: Passes | None, caplog) -> None:
    """Somebody listens where an ingress did."""
    caplog.set_level(logging.WARNING)
    taken: list[Submission] = []
    ended = asyncio.Event()
    seen = b""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        frame = pack_submission(Submission(b"e" * 16, b"k" * 16, request()))
        writer.write(frame)
        seen = await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    one = BusSender(lambda key: None, lambda: None, on_submission=lambda channel, it: taken.append(it))
    channel = one.open_stream(server.sockets[0].getsockname(), passes)
    one.close_stream(channel)
    await asyncio.wait_for(ended.wait(), 5)
    assert taken == [] and "token bus: dropped the connection" in caplog.text
    # what the engine shows does not tell what the ingress has to
    assert b"i" * 16 not in seen
    await one.close()
    server.close()


def test_the_engine_reads_nothing_but_orders() -> None:
    with pytest.raises(FrameError, match="Hello, where only"):
        unpack_order(frames.pack_hello(Hello(b"k" * 16, "a"))[frames.PREFIX.size :])


async def test_nothing_is_kept_for_ever() -> None:
    forgotten: list[str] = []
    kept = Unheard(forgotten.append, kept_s=0.02)
    kept.add("a", "A")
    kept.add("b", "B")
    kept.forget("a")
    kept.forget("a")
    assert list(kept) == ["B"]
    await until(lambda: len(kept) == 0, "the time")
    assert forgotten == ["A", "B"]
