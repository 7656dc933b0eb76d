"""Sender and listener over real sockets on one event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from hybridserve.cluster.bus import frames
from hybridserve.cluster.bus.frames import Entry
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.sender import BusSender, Channel
from hybridserve.cluster.bus.stream import Stream
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.replicas.engine.plan import EngineOutput

pytestmark = pytest.mark.anyio

LOAD = ReplicaLoad(1, 2, 3, 4, 5, 6, 7, 8, 9.0, 10, 11)


@dataclass
class Ends:
    sender: BusSender
    listener: BusListener
    cancelled: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def ends(max_backlog_bytes: int = 10_000, idle_s: float = 0.05) -> AsyncIterator[Ends]:
    cancelled: list[bytes] = []
    sender = BusSender(cancelled.append, lambda: LOAD, max_backlog_bytes, idle_s)
    listener = BusListener("127.0.0.1")
    await listener.start()
    try:
        yield Ends(sender, listener, cancelled)
    finally:
        await sender.close()
        await listener.close()


def packed(stream: Stream, index: int, attempt: int = 0) -> bytes:
    return frames.pack_entry(Entry(stream.reply_to.key, attempt, EngineOutput("", index, (index,))))


async def tokens(stream: Stream, count: int) -> list[int]:
    """The next `count`, which may come joined."""
    got: list[int] = []
    while len(got) < count:
        got += (await asyncio.wait_for(stream.get(), 5)).token_ids
    return got


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


async def connected(both: Ends) -> tuple[Stream, Channel]:
    """A stream whose first entry has been read, and its engine's side."""
    stream = both.listener.open_stream()
    channel = both.sender.open_stream(stream.reply_to.address)
    both.sender.send(channel, [packed(stream, 0)])
    await asyncio.wait_for(stream.get(), 5)
    return stream, channel


async def test_entries_arrive_in_order_with_the_load() -> None:
    async with ends() as both:
        streams = [both.listener.open_stream() for _ in range(3)]
        channel = both.sender.open_stream(streams[0].reply_to.address)
        for index in range(20):
            both.sender.send(channel, [packed(stream, index) for stream in streams])
        for stream in streams:
            got = await tokens(stream, 20)
            assert got == list(range(20))
        assert both.listener.loads == [LOAD]


async def test_an_idle_channel_reports_the_load() -> None:
    async with ends() as both:
        both.sender.open_stream(both.listener.open_stream().reply_to.address)
        await until(lambda: both.listener.loads == [LOAD], "a load without news")


async def test_unknown_keys_and_old_attempts_are_dropped_and_counted() -> None:
    async with ends() as both:
        stream = both.listener.open_stream(attempt=1, first_index=5)
        gone = both.listener.open_stream()
        both.listener.close_stream(gone)
        channel = both.sender.open_stream(stream.reply_to.address)
        both.sender.send(
            channel, [packed(gone, 0), packed(stream, 0, attempt=0), packed(stream, 5, attempt=1)]
        )
        assert (await asyncio.wait_for(stream.get(), 5)).first_index == 5
        assert both.listener.counts == {"unknown": 1, "attempt": 1}
        assert gone.next_index == 0


async def test_cancel_travels_back() -> None:
    async with ends() as both:
        stream, channel = await connected(both)
        both.listener.cancel(stream)
        await until(lambda: both.cancelled == [stream.reply_to.key], "the cancel")


@pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
async def test_a_cancel_meets_a_connection_that_has_just_been_reset() -> None:
    async with ends() as both:
        stream, channel = await connected(both)
        writer = stream.writer
        writer.transport.abort()
        turns = 0
        while writer in both.listener._connections:
            both.listener.cancel(stream)
            await asyncio.sleep(0)
            turns += 1
        assert turns > 0


async def test_reconnects_after_a_broken_connection_and_says_that_something_may_be_lost() -> None:
    async with ends() as both:
        stream, channel = await connected(both)
        assert stream.writer is not None
        stream.writer.transport.abort()
        await until(lambda: channel.epoch == 1, "the broken connection")
        both.sender.send(channel, [packed(stream, 1)])
        assert (await asyncio.wait_for(stream.get(), 5)).first_index == 1


async def test_a_malformed_frame_ends_only_its_connection() -> None:
    async with ends() as both:
        stream = both.listener.open_stream()
        reader, writer = await asyncio.open_connection(*stream.reply_to.address)
        writer.write(frames.PREFIX.pack(3) + b"abc")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        channel = both.sender.open_stream(stream.reply_to.address)
        both.sender.send(channel, [packed(stream, 0)])
        assert (await asyncio.wait_for(stream.get(), 5)).first_index == 0


async def test_a_slow_ingress_loses_its_backlog_and_blocks_nobody() -> None:
    released = asyncio.Event()

    async def read_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    async with ends() as both:
        slow = await asyncio.start_server(read_nothing, "127.0.0.1", 0)
        slow_channel = both.sender.open_stream(slow.sockets[0].getsockname())
        stream = both.listener.open_stream()
        channel = both.sender.open_stream(stream.reply_to.address)
        big = frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 0, tuple(range(3000)))))
        longest = 0.0
        for index in range(3000):
            began = time.perf_counter()
            both.sender.send(slow_channel, [big])
            both.sender.send(channel, [packed(stream, index)])
            longest = max(longest, time.perf_counter() - began)
            await asyncio.sleep(0)
            assert (await asyncio.wait_for(stream.get(), 5)).first_index == index
        assert slow_channel.epoch > 0
        assert slow_channel.dropped_frames > 0
        assert channel.epoch == 0
        assert longest < 1.0
        released.set()
        slow.close()


async def test_a_frame_that_is_too_long_is_split_and_an_entry_that_is_too_long_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 150)
    async with ends() as both:
        stream = both.listener.open_stream()
        channel = both.sender.open_stream(stream.reply_to.address)
        too_long = frames.pack_entry(Entry(stream.reply_to.key, 0, EngineOutput("", 99, tuple(range(200)))))
        both.sender.send(
            channel, [*(packed(stream, index) for index in range(6)), too_long, packed(stream, 6)]
        )
        got = await tokens(stream, 7)
        assert got == list(range(7))
        assert channel.dropped_frames == 1


async def test_nobody_is_dialled_again_when_no_stream_is_left() -> None:
    async with ends() as both:
        stream = both.listener.open_stream()
        await both.listener.close()
        channel = both.sender.open_stream(stream.reply_to.address)
        both.sender.close_stream(channel)
        await until(lambda: channel.closed, "the channel to give up")
