"""Frames survive the wire, and nothing else does."""

from dataclasses import astuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.bus import frames
from hybridserve.cluster.bus.frames import Cancel, Entry, FrameError, News
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs

counts = st.integers(0, 2**40)
token_ids = st.integers(0, 2**20)
numbers = st.floats(allow_nan=False)
logprobs = st.builds(
    TokenLogprobs,
    numbers,
    counts,
    st.lists(token_ids, max_size=4).map(tuple),
    st.lists(numbers, max_size=4).map(tuple),
)
outputs = st.builds(
    EngineOutput,
    request_id=st.just(""),
    first_index=counts,
    token_ids=st.lists(token_ids, max_size=8).map(tuple),
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    prompt_logprobs=st.lists(st.tuples(token_ids, logprobs), max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_token_id=st.none() | token_ids,
    error=st.none() | st.text(max_size=20),
    num_preemptions=counts,
    first_scheduled_time=numbers,
)
entries = st.builds(Entry, st.binary(min_size=16, max_size=16), st.integers(0, 9), outputs)
loads = st.builds(ReplicaLoad, *([counts] * 8), numbers, *([counts] * 6), numbers)


def body_of(frame: bytes) -> bytes:
    length = frames.frame_length(frame[: frames.PREFIX.size])
    body = frame[frames.PREFIX.size :]
    assert len(body) == length
    return body


@given(st.none() | loads, st.lists(entries, max_size=20), st.text(max_size=20))
def test_news_round_trip(load: ReplicaLoad | None, sent: list[Entry], replica: str) -> None:
    frame = frames.pack_news(load, [frames.pack_entry(entry) for entry in sent], replica)
    assert frames.unpack(body_of(frame)) == News(load, tuple(sent), replica)


def test_cancel_round_trip() -> None:
    assert frames.unpack(body_of(frames.pack_cancel(Cancel(b"k" * 16)))) == Cancel(b"k" * 16)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_frame_error_or_are_a_frame(body: bytes) -> None:
    try:
        message = frames.unpack(body)
    except FrameError:
        return
    assert isinstance(message, News | Cancel)


@pytest.mark.parametrize(
    "fields",
    [7, (), (3, b"k" * 16), (2, b"short"), (2, 5), (1, None), (1, (1, 2), ()), (1, None, ((b"k" * 16, 0),))],
)
def test_wrong_shapes_are_refused(fields: object) -> None:
    with pytest.raises(FrameError):
        frames.unpack(msgpack.packb(fields))


def test_length_cap_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match="101 bytes, at most 100"):
        frames.frame_length(frames.PREFIX.pack(101))
    assert frames.frame_length(frames.PREFIX.pack(100)) == 100
    with pytest.raises(FrameError, match="at most 100 are sent"):
        frames.pack_news(
            None, [frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 0, tuple(range(200)))))]
        )


def test_a_token_of_64_streams_is_a_small_frame() -> None:
    packed = [frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 500, (70000,)))) for _ in range(64)]
    load = ReplicaLoad(*([1000] * 8), 5.0, 7, 9, 10**6, 10**6, 10**9, 10**9, 1.5)
    assert len(astuple(load)) == 16
    assert len(frames.pack_news(load, packed, "abcd1234")) < 64 * 50
