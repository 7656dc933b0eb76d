"""Streams of a busy ingress are read less often; what must not wait does not."""

import asyncio

import pytest

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.pace import LONGEST_S, TICK_S, Pace
from hybridserve.cluster.bus.stream import Stream
from hybridserve.replicas.engine.plan import EngineOutput

pytestmark = pytest.mark.anyio


class Clocks:
    """Of a thread that does as it is told."""

    def __init__(self) -> None:
        self.now = self.worked = 100.0

    def pace(self) -> Pace:
        return Pace(lambda: True, lambda: self.now, lambda: self.worked)

    def pass_(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.worked += seconds * share


def token(index: int, reason: str | None = None) -> EngineOutput:
    return EngineOutput("", index, (100 + index,), finish_reason=reason)


def looked(pace: Pace, clocks: Clocks, share: float, times: int, seconds: float = TICK_S) -> float:
    for _ in range(times):
        clocks.pass_(seconds, share)
        pace.look()
    return pace.interval_s


async def test_it_slows_down_at_once_and_back_slowly() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    assert looked(pace, clocks, 0.55, 10) == 0.0
    assert looked(pace, clocks, 0.9, 1) == TICK_S
    assert looked(pace, clocks, 0.9, 10) == LONGEST_S
    assert looked(pace, clocks, 0.55, 10) == LONGEST_S
    assert looked(pace, clocks, 0.1, 1) == LONGEST_S - TICK_S / 2
    assert looked(pace, clocks, 0.1, 20) == 0.0
    # it did little, but was kept from doing more
    assert looked(pace, clocks, 0.1, 1, seconds=3 * TICK_S) == TICK_S


async def test_first_news_and_the_end_do_not_wait() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    assert looked(pace, clocks, 1.0, 5) == LONGEST_S
    stream = Stream(ReplyTo("", 1, b"k" * 16), pace=pace)
    stream.take(token(0))
    stream.take(token(1))
    # the first alone, as ever, and what came with it does not wait either
    assert (await stream.get()).token_ids == (100,)
    assert (await stream.get()).token_ids == (101,)
    reader = asyncio.create_task(stream.get())
    for index in range(2, 5):
        await asyncio.sleep(0)
        stream.take(token(index))
    looked(pace, clocks, 1.0, 2)
    await asyncio.sleep(0)
    assert not reader.done()
    looked(pace, clocks, 1.0, 3)
    assert (await reader).token_ids == (102, 103, 104)
    stream.take(token(5))
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.take(token(6, "length"))
    assert (await reader).token_ids == (105, 106)
    stream.wake()
    assert await stream.get() is None


async def test_a_reader_that_comes_too_early_is_roused_when_it_is_time() -> None:
    clocks = Clocks()
    pace = clocks.pace()
    looked(pace, clocks, 1.0, 5)
    stream = Stream(ReplyTo("", 1, b"k" * 16), pace=pace)
    stream.take(token(0))
    await stream.get()
    stream.take(token(1))
    looked(pace, clocks, 0.55, 5)
    # nobody was there when it was due
    assert (await asyncio.wait_for(stream.get(), 1)).token_ids == (101,)
    stream.take(token(2))
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    assert not reader.done()
    looked(pace, clocks, 0.55, 5)
    assert (await asyncio.wait_for(reader, 1)).token_ids == (102,)


async def test_it_looks_while_there_are_streams() -> None:
    listener = BusListener("127.0.0.1")
    await listener.start()
    stream = listener.open_stream()
    pace = listener._pace
    before = pace._looked
    async with asyncio.timeout(10):
        while pace._looked == before:
            await asyncio.sleep(TICK_S)
        assert pace._running
        listener.close_stream(stream)
        while pace._running:
            await asyncio.sleep(TICK_S)
    assert pace.interval_s == 0.0
    listener.open_stream()
    assert pace._running
    await listener.close()
