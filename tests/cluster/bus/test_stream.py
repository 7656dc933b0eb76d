"""The order that a stream's news are put in, whatever way they come."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.bus.stream import Stream, StreamOverflow
from hybridserve.cluster.pool.client import _merge
from hybridserve.cluster.pool.interface import ReplicaFailed
from hybridserve.cluster.pool.record import GenerationReply, OutputRecord
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs

REPLY_TO = ReplyTo("127.0.0.1", 1, b"k" * 16)


def token(index: int, reason: str | None = None) -> EngineOutput:
    return EngineOutput("", index, (100 + index,), (TokenLogprobs(-float(index), 1),), finish_reason=reason)


def merged(outputs: list[EngineOutput], first_index: int) -> EngineOutput:
    record = OutputRecord("r", first_index)
    for output in outputs:
        record.append(output)
    return record.merged()


async def collect(stream: Stream, call: "asyncio.Task[GenerationReply]") -> list[EngineOutput]:
    return [output async for output in _merge(stream, call)]


@given(
    base=st.integers(0, 5),
    count=st.integers(1, 12),
    error_end=st.booleans(),
    data=st.data(),
)
def test_any_loss_duplication_and_reordering_gives_every_token_once_in_order(
    base: int, count: int, error_end: bool, data: st.DataObject
) -> None:
    """Frames are steps' news or resends of all so far; some are lost, some come twice, in any order, and the
    reply comes at any moment between them."""
    steps = [token(base + i) for i in range(count)]
    end = EngineOutput("", base + count, finish_reason="error", error="NaN")
    if error_end:
        steps.append(end)
    else:
        steps[-1] = token(base + count - 1, "length")
    frames = steps + [merged(steps[: i + 1], base) for i in range(len(steps))]
    frames.append(EngineOutput("", first_index=0))
    order = data.draw(st.lists(st.sampled_from(frames), max_size=3 * len(frames)))
    reply_at = data.draw(st.integers(0, len(order)))
    pauses = data.draw(st.sets(st.integers(0, len(order))))
    whole = merged(steps, base)

    async def go() -> list[EngineOutput]:
        stream = Stream(REPLY_TO, base)
        replied: asyncio.Future[GenerationReply] = asyncio.get_running_loop().create_future()

        async def call() -> GenerationReply:
            return await replied

        task = asyncio.create_task(call())
        task.add_done_callback(lambda _: stream.wake())
        reader = asyncio.create_task(collect(stream, task))
        for at in range(len(order) + 1):
            if at == reply_at:
                replied.set_result(GenerationReply(output=whole))
            if at < len(order):
                stream.take(order[at])
            if at in pauses:
                await asyncio.sleep(0)
        return await reader

    outputs = asyncio.run(go())
    assert [t for output in outputs for t in output.token_ids] == list(whole.token_ids)
    assert [one for output in outputs for one in output.logprobs] == list(whole.logprobs)
    at = base
    for output in outputs:
        assert output.first_index == at
        at += len(output.token_ids)
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == whole.finish_reason


@given(st.lists(st.integers(0, 9), max_size=30))
def test_what_came_before_a_failed_call_is_still_delivered(lost: list[int]) -> None:
    async def go() -> None:
        stream = Stream(REPLY_TO)
        for index in range(10):
            if index not in lost:
                stream.take(token(index))

        async def call() -> GenerationReply:
            return GenerationReply(failed="it died")

        task = asyncio.create_task(call())
        task.add_done_callback(lambda _: stream.wake())
        got = []
        with pytest.raises(ReplicaFailed, match="it died"):
            async for output in _merge(stream, task):
                got += output.token_ids
        first_lost = min(lost, default=10)
        assert got == list(range(100, 100 + first_lost))

    asyncio.run(go())


def test_what_becomes_of_each() -> None:
    accepted = []
    stream = Stream(REPLY_TO, 2, on_accepted=lambda: accepted.append(1))
    assert stream.take(EngineOutput("", 0)) == "nothing"
    assert stream.take(token(3)) == "gap"
    assert stream.take(token(2)) == "new"
    assert stream.take(token(2)) == "duplicate"
    assert stream.take(merged([token(2), token(3)], 2)) == "new"
    assert stream.take(token(4, "stop")) == "new"
    assert stream.take(token(4, "stop")) == "duplicate"
    assert accepted == [1]


def test_an_unread_stream_overflows_and_one_long_resend_does_not() -> None:
    async def go() -> None:
        stream = Stream(REPLY_TO, max_unread_tokens=5)
        assert stream.take(merged([token(i) for i in range(50)], 0)) == "new"
        assert (await stream.get()).first_index == 0
        for index in range(50, 55):
            assert stream.take(token(index)) == "new"
        assert stream.take(token(55)) == "overflow"
        assert stream.take(token(56)) == "duplicate"
        with pytest.raises(StreamOverflow, match="5 tokens"):
            await stream.get()

    asyncio.run(go())


def test_a_reader_that_waits_is_told_of_news_and_of_wake() -> None:
    async def go() -> None:
        stream = Stream(REPLY_TO)
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.take(token(0))
        stream.wake()
        assert (await waiting).token_ids == (100,)
        assert await stream.get() is None
        # a reader that gave up leaves nothing behind
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.get()
        stream.take(token(1))
        assert (await stream.get()).token_ids == (101,)

    asyncio.run(go())
