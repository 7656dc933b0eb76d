"""What a peer can cost the other end of the bus: silence, garbage, floods, and not reading."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgpack
import pytest

from hybridserve.cluster.bus import frames, listener
from hybridserve.cluster.bus.frames import Entry
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.sender import BusSender, Channel
from hybridserve.replicas.engine.plan import EngineOutput

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def listening(**bounds: object) -> AsyncIterator[BusListener]:
    one = BusListener("127.0.0.1", **bounds)
    await one.start()
    try:
        yield one
    finally:
        await one.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


def news(key: bytes, count: int = 1) -> bytes:
    return frames.pack_news(None, [frames.pack_entry(Entry(key, 0, EngineOutput("", 0, (5,))))] * count)


async def dial(one: BusListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*one.open_stream().reply_to.address)


async def test_a_connection_that_says_nothing_or_half_a_frame_is_dropped() -> None:
    async with listening(silence_s=0.1) as one:
        for said in (b"", frames.PREFIX.pack(100) + b"half"):
            reader, writer = await dial(one)
            writer.write(said)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        half = frames.PREFIX.pack(listener._LARGE_FRAME_BYTES + 1) + b"half"
        large = [await dial(one) for _ in range(2)]
        for _, writer in large:
            writer.write(half)
        for reader, writer in large:
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        await until(lambda: not one._connections, "all connections to be forgotten")


async def test_large_frames_arrive() -> None:
    async with listening() as one:
        stream = one.open_stream()
        _, writer = await asyncio.open_connection(*stream.reply_to.address)
        tokens = tuple(range(600_000))
        frame = frames.pack_news(
            None, [frames.pack_entry(Entry(stream.reply_to.key, 0, EngineOutput("", 0, tokens)))]
        )
        assert len(frame) > listener._LARGE_FRAME_BYTES
        writer.write(frame)
        assert (await asyncio.wait_for(stream.get(), 10)).token_ids == tokens
        writer.close()


async def test_no_more_connections_than_allowed() -> None:
    async with listening(max_connections=2) as one:
        kept = [await dial(one) for _ in range(2)]
        await until(lambda: len(one._connections) == 2, "two connections")
        reader, writer = await dial(one)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert one.counts["refused"] == 1
        writer.close()
        kept[0][1].close()
        await until(lambda: len(one._connections) == 1, "one to leave")
        _, again = await dial(one)
        await until(lambda: len(one._connections) == 2, "another to come")
        for _, writer in (kept[1], (None, again)):
            writer.close()


async def test_a_flood_of_unknown_keys_ends_the_connection_and_no_other() -> None:
    async with listening() as one:
        stream = one.open_stream()
        _, honest = await asyncio.open_connection(*stream.reply_to.address)
        reader, writer = await dial(one)
        flood = news(b"?" * 16, 4096)
        for _ in range(5):
            writer.write(flood)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert one.counts["unknown"] == listener._MAX_UNKNOWN_ENTRIES + 1
        assert one.counts["dropped"] == 1
        honest.write(news(stream.reply_to.key))
        assert (await asyncio.wait_for(stream.get(), 5)).token_ids == (5,)
        honest.close()
        writer.close()


async def test_a_frame_of_too_many_entries_is_refused_by_both_ends() -> None:
    with pytest.raises(frames.FrameError, match=f"8193 entries, at most {frames.MAX_ENTRIES} are sent"):
        news(b"k" * 16, frames.MAX_ENTRIES + 1)
    with pytest.raises(frames.FrameError, match="8193 entries, at most 8192 are taken"):
        frames.unpack(msgpack.packb((1, "", None, [()] * 8193)))


async def test_an_engine_that_reads_no_cancels_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_UNSENT_BYTES", 1000)
    async with listening() as one:
        stream = one.open_stream()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, stream.reply_to.address)
            await asyncio.get_running_loop().sock_sendall(deaf, news(stream.reply_to.key))
            await asyncio.wait_for(stream.get(), 5)
            for _ in range(200_000):
                one.cancel(stream)
                if not one._connections or stream.writer.transport.is_closing():
                    break
            await until(lambda: not one._connections, "the deaf engine's connection to end")


async def test_a_stream_that_nobody_reads_is_cancelled_and_its_neighbour_goes_on() -> None:
    cancelled: list[bytes] = []
    async with listening(max_unread_tokens=10) as one:
        sender = BusSender(cancelled.append, lambda: None)
        slow, quick = one.open_stream(), one.open_stream()
        channel = sender.open_stream(slow.reply_to.address)
        for index in range(30):
            for stream in (slow, quick):
                entry = Entry(stream.reply_to.key, 0, EngineOutput("", index, (index,)))
                sender.send(channel, [frames.pack_entry(entry)])
            assert (await asyncio.wait_for(quick.get(), 5)).first_index == index
        await until(lambda: cancelled == [slow.reply_to.key], "the cancel of the slow one")
        assert slow.overflowed and not quick.overflowed
        assert one.counts["overflow"] == 1
        await sender.close()


async def test_an_ingress_that_takes_no_bytes_is_dialled_anew_and_nothing_else_waits() -> None:
    """The write timeout: the backlog is lost, the epoch grows, and the next connection gets news again."""
    dialled = 0
    asleep = asyncio.Event()

    async def read_nothing_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        if dialled == 1:
            await asleep.wait()
        else:
            received.set_result(await reader.readexactly(frames.PREFIX.size))
            await asleep.wait()
        writer.close()

    received = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(read_nothing_at_first, "127.0.0.1", 0)
    sender = BusSender(lambda key: None, lambda: None, max_backlog_bytes=2**26, write_timeout_s=0.2)
    channel = sender.open_stream(server.sockets[0].getsockname())
    big = frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 0, tuple(range(400_000)))))
    for _ in range(20):
        sender.send(channel, [big])
    await until(lambda: channel.epoch > 0, "the write timeout")
    sender.send(channel, [frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 0, (1,))))])
    await asyncio.wait_for(received, 5)
    assert dialled == 2
    await sender.close()
    asleep.set()
    server.close()


async def test_a_peer_that_sends_an_engine_anything_but_cancels_is_dialled_anew() -> None:
    dialled = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        writer.write(frames.PREFIX.pack(frames.MAX_CANCEL_BYTES + 1))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    sender = BusSender(lambda key: None, lambda: None)
    sender.open_stream(server.sockets[0].getsockname())
    await until(lambda: dialled > 1, "the connection to be dropped")
    await sender.close()
    server.close()


async def test_an_ingress_that_was_there_and_is_not_any_more_is_reported_once() -> None:
    gone: list[Channel] = []
    async with listening() as one:
        sender = BusSender(lambda key: None, lambda: None, on_gone=gone.append)
        stream = one.open_stream()
        channel = sender.open_stream(stream.reply_to.address)
        await until(lambda: bool(one._connections), "the connection")
    await until(lambda: bool(gone), "the report")
    assert gone == [channel]
    sender.close_stream(channel)
    await until(lambda: channel.closed, "the channel to give up")
    assert gone == [channel]
    never = sender.open_stream(("127.0.0.1", 1))
    await until(lambda: never._task.done() or not never.closed, "a dial")
    await asyncio.sleep(1.0)
    # it never was: a bus that is shut off somewhere delays tokens, and ends no request
    assert gone == [channel]
    await sender.close()
