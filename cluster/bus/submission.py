"""A request on its way from the ingress to an engine by the bus, as bytes, and all else that goes there.

Owns that part of the wire format. Knows nothing of sockets.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from hybridserve.cluster.bus.frames import Cancel, FrameError, checked_key, unpack, with_length
from hybridserve.cluster.pool.interface import GenerationRequest
from hybridserve.replicas.sampling_params import SamplingParams

MAX_SUBMISSION_BYTES = 4 * 2**20
"""A prompt of a million tokens."""
_SUBMISSION = 5
# of four bytes on everything that Python runs on
_TOKEN = "I"


@dataclass(frozen=True)
class Submission:
    """A request, and where its news are to go: to the connection that it came by, under `key`."""

    token: bytes
    """`Passes.ingress`."""
    key: bytes
    request: GenerationRequest


def pack_submission(one: Submission) -> bytes | None:
    """A frame with its length in front; None for a request that has to go another way: its prompt is too
    long, or its answer's log-probabilities may be, or a number is one that no frame can hold."""
    request = one.request
    params = request.params
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return None
    fields = vars(params) | {"logit_bias": tuple(params.logit_bias.items())}
    try:
        body = msgpack.packb(
            (
                _SUBMISSION,
                one.token,
                one.key,
                request.attempt,
                _packed_ids(request.prompt_token_ids),
                _packed_ids(request.output_token_ids),
                tuple(fields.values()),
                request.request_id,
                request.stated_max_tokens,
                request.priority,
                request.client_request_id,
            )
        )
    except OverflowError:
        return None
    return None if len(body) > MAX_SUBMISSION_BYTES else with_length(body)


def unpack_order(body: bytes) -> Cancel | Submission:
    """What an ingress tells an engine, in `body` (a frame without its length).

    Raises:
        FrameError: `body` is neither.
    """
    try:
        kind, *fields = msgpack.unpackb(body, use_list=False)
        if kind == _SUBMISSION:
            return _submission(*fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"malformed frame of {len(body)} bytes: {error}") from error
    message = unpack(body)
    if not isinstance(message, Cancel):
        raise FrameError(f"{type(message).__name__}, where only requests and cancels are expected")
    return message


def _submission(
    token: object,
    key: object,
    attempt: int,
    prompt: bytes,
    output: bytes,
    params: tuple[Any, ...],
    request_id: str,
    stated_max_tokens: int | None,
    priority: Any,
    client_request_id: str,
) -> Submission:
    """Raises ValueError or TypeError."""
    fields = dict(zip(SamplingParams.__dataclass_fields__, params, strict=True))
    fields["logit_bias"] = dict(fields["logit_bias"])
    # as pickle makes them: checking them again would cost more than all else here
    checked = object.__new__(SamplingParams)
    vars(checked).update(fields)
    request = GenerationRequest(
        request_id,
        _ids(prompt),
        checked,
        stated_max_tokens,
        priority,
        client_request_id,
        _ids(output),
        attempt,
    )
    return Submission(checked_key(token), checked_key(key), request)


def _packed_ids(token_ids: Sequence[int]) -> bytes:
    # as msgpack's numbers, a long prompt takes twenty times as long
    return _little_endian(array(_TOKEN, token_ids)).tobytes()


def _ids(packed: bytes) -> tuple[int, ...]:
    ids = array(_TOKEN)
    ids.frombytes(packed)
    return tuple(_little_endian(ids))


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
