"""Requests survive the wire, and nothing else comes out of it."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.bus import frames, submission
from hybridserve.cluster.bus.frames import Cancel, FrameError
from hybridserve.cluster.bus.submission import Submission, pack_submission, unpack_order
from hybridserve.cluster.pool.interface import GenerationRequest
from hybridserve.replicas.sampling_params import SamplingParams

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 2**40),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 2**40),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**20), max_size=3),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 2**20), st.floats(-100, 100), max_size=3),
    skip_special_tokens=st.booleans(),
)
requests = st.builds(
    GenerationRequest,
    request_id=st.text(max_size=9),
    prompt_token_ids=token_ids,
    params=sampling,
    stated_max_tokens=st.none() | st.integers(1, 2**40),
    priority=st.sampled_from(["high", "normal", "low"]),
    client_request_id=st.text(max_size=9),
    output_token_ids=token_ids,
    attempt=st.integers(0, 9),
)
TOKEN, KEY = b"t" * 16, b"k" * 16


def packed(request: GenerationRequest) -> bytes | None:
    return pack_submission(Submission(TOKEN, KEY, request))


@given(requests)
def test_round_trip(request: GenerationRequest) -> None:
    frame = packed(request)
    assert frame is not None
    length = frames.frame_length(frame[: frames.PREFIX.size], submission.MAX_SUBMISSION_BYTES)
    body = frame[frames.PREFIX.size :]
    assert len(body) == length
    assert unpack_order(body) == Submission(TOKEN, KEY, request)


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest("r", (1,), SamplingParams(logprobs=0)),
        GenerationRequest("r", (1,), SamplingParams(prompt_logprobs=1)),
        GenerationRequest("r", (1,), SamplingParams(top_k=2**70)),
        GenerationRequest("r", (1,) * (submission.MAX_SUBMISSION_BYTES // 4), SamplingParams()),
    ],
    ids=["logprobs", "prompt_logprobs", "a number of 70 bits", "a prompt of 4 MiB"],
)
def test_what_goes_another_way(request_: GenerationRequest) -> None:
    assert packed(request_) is None


def test_cancels_come_the_same_way() -> None:
    assert unpack_order(frames.pack_cancel(Cancel(KEY))[frames.PREFIX.size :]) == Cancel(KEY)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_an_order_or_raise_frame_error(body: bytes) -> None:
    try:
        assert isinstance(unpack_order(body), Cancel | Submission)
    except FrameError:
        assert body is not None


@pytest.mark.parametrize("at", range(11))
def test_a_request_with_any_field_missing_is_malformed(at: int) -> None:
    frame = packed(GenerationRequest("r", (1,), SamplingParams()))
    fields = list(msgpack.unpackb(frame[frames.PREFIX.size :], use_list=False))
    del fields[at]
    with pytest.raises(FrameError):
        unpack_order(msgpack.packb(fields))


def test_news_are_no_order() -> None:
    with pytest.raises(FrameError, match="News, where only requests and cancels are expected"):
        unpack_order(frames.pack_news(None, [])[frames.PREFIX.size :])
