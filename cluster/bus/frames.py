"""What travels on the token bus, as bytes: length-prefixed msgpack, never pickle.

Owns the wire format. Knows nothing of sockets or of who waits for a stream. What an engine says: hello (first
on a connection: who it is), news (its load and one entry for each request that has something new), failure
(of one request). What an ingress says: cancel, and the requests of `submission`.
"""

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs

KEY_BYTES = 16
MAX_FRAME_BYTES = 16 * 2**20
MAX_CANCEL_BYTES = 64
"""All that an engine reads of an ingress that has told it no passes."""
MAX_ENTRIES = 8192
"""In one frame; more than any batch."""
_MAX_TOKENS = 2**21
"""In one list; more than any context."""
PREFIX = struct.Struct("<I")
_NEWS = 1
_CANCEL = 2
_HELLO = 3
_FAILURE = 4


class FrameError(Exception):
    """Bytes that are no frame of ours; the connection they came from is of no more use."""


@dataclass(frozen=True)
class Passes:
    """By which the ends of a connection know each other: random, a listener's own, told inside Serve's calls
    alone. Two, so that who listens in an ingress' place learns nothing by which it could send requests."""

    engine: bytes
    """Shown by the engine when it has dialled."""
    ingress: bytes
    """Shown by the ingress with every request."""


@dataclass(frozen=True)
class ReplyTo:
    """Where the tokens of one request are to be sent (made by the ingress, passed inside the unary call)."""

    host: str
    port: int
    key: bytes
    """16 random bytes that name the stream."""
    attempt: int = 0
    """Counts the replicas a request was given to. Each has a key of its own, so that one that still runs an
    older attempt is neither heard nor takes a cancel for the newer one."""
    passes: Passes | None = None
    """With these the ingress can send further requests by the connection; None: it will not."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class Entry(NamedTuple):
    """News of one request. `output.request_id` does not travel: the key names the stream."""

    key: bytes
    attempt: int
    output: EngineOutput


@dataclass(frozen=True)
class News:
    """One step's news for one ingress; without entries it says only how busy the engine is."""

    load: ReplicaLoad | None
    entries: tuple[Entry, ...] = ()
    replica: str = ""
    """Who reports the load, by the name that routing knows it by."""


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this stream any more."""

    key: bytes


@dataclass(frozen=True)
class Hello:
    """The first frame of an engine that a call has told the passes."""

    token: bytes
    """`Passes.engine`."""
    replica: str


@dataclass(frozen=True)
class Failure:
    """The end of a request that came by the bus and has no output. Exactly one of the messages is set."""

    key: bytes
    attempt: int
    refused: str | None = None
    """The engine would not take the request; a message for the client."""
    failed: str | None = None
    """The pool could not finish it."""


def pack_entry(entry: Entry) -> bytes:
    """One entry as msgpack; `pack_news` puts such pieces together, so that a too long one can be left out."""
    out = entry.output
    fields = (
        entry.key,
        entry.attempt,
        out.first_index,
        out.token_ids,
        # most have none, and an empty comprehension costs as much as packing all the rest
        [_logprobs_fields(one) for one in out.logprobs] if out.logprobs else (),
        [(token_id, _logprobs_fields(one)) for token_id, one in out.prompt_logprobs]
        if out.prompt_logprobs
        else (),
        out.finish_reason,
        out.stop_token_id,
        out.error,
        out.num_preemptions,
        out.first_scheduled_time,
    )
    return msgpack.packb(fields)


def pack_news(load: ReplicaLoad | None, packed_entries: list[bytes], replica: str = "") -> bytes:
    """A news frame with its length in front.

    Raises:
        FrameError: the frame would be longer than MAX_FRAME_BYTES, or have more than MAX_ENTRIES.
    """
    if len(packed_entries) > MAX_ENTRIES:
        raise FrameError(f"a frame of {len(packed_entries)} entries, at most {MAX_ENTRIES} are sent")
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(4)
    packer.pack(_NEWS)
    packer.pack(replica)
    # as astuple, which copies deeply and takes ten times as long
    packer.pack(None if load is None else tuple(vars(load).values()))
    packer.pack_array_header(len(packed_entries))
    return with_length(b"".join((packer.bytes(), *packed_entries)))


def pack_cancel(cancel: Cancel) -> bytes:
    return with_length(msgpack.packb((_CANCEL, cancel.key)))


def pack_hello(hello: Hello) -> bytes:
    return with_length(msgpack.packb((_HELLO, hello.token, hello.replica)))


def pack_failure(failure: Failure) -> bytes:
    return with_length(msgpack.packb((_FAILURE, *vars(failure).values())))


def frame_length(prefix: bytes, limit: int | None = None) -> int:
    """The length of the frame's body, from the PREFIX.size bytes before it.

    Raises:
        FrameError: longer than `limit`, by default MAX_FRAME_BYTES.
    """
    limit = MAX_FRAME_BYTES if limit is None else limit
    (length,) = PREFIX.unpack(prefix)
    if length > limit:
        raise FrameError(f"a frame of {length} bytes, at most {limit} are taken")
    return length


def unpack(body: bytes) -> News | Cancel | Hello | Failure:
    """The frame in `body` (without its length).

    Raises:
        FrameError: `body` is no frame.
    """
    try:
        kind, *fields = msgpack.unpackb(body, use_list=False, max_array_len=_MAX_TOKENS)
        if kind == _CANCEL:
            (key,) = fields
            return Cancel(checked_key(key))
        if kind == _NEWS:
            replica, load, entries = fields
            if not isinstance(replica, str):
                raise ValueError(f"a replica's name is a string, got {replica!r}")
            if len(entries) > MAX_ENTRIES:
                raise ValueError(f"{len(entries)} entries, at most {MAX_ENTRIES} are taken")
            known = None if load is None else ReplicaLoad(*load)
            return News(known, tuple(_entry(one) for one in entries), replica)
        if kind == _HELLO:
            token, replica = fields
            if not isinstance(replica, str):
                raise ValueError(f"a replica's name is a string, got {replica!r}")
            return Hello(checked_key(token), replica)
        if kind == _FAILURE:
            key, *said = fields
            return Failure(checked_key(key), *said)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"malformed frame of {len(body)} bytes: {error}") from error
    raise FrameError(f"unknown kind of frame {kind!r}")


def with_length(body: bytes) -> bytes:
    """The frame of `body`. Raises FrameError when it is longer than MAX_FRAME_BYTES."""
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are sent")
    return PREFIX.pack(len(body)) + body


def _logprobs_fields(one: TokenLogprobs) -> tuple[Any, ...]:
    return one.logprob, one.rank, one.top_token_ids, one.top_logprobs


def checked_key(key: object) -> bytes:
    """`key`, if it is one. Raises ValueError."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"a stream key is {KEY_BYTES} bytes, got {key!r}")
    return key


def _entry(fields: tuple[Any, ...]) -> Entry:
    # written out: this runs for every token of every stream
    (
        key,
        attempt,
        first_index,
        token_ids,
        logprobs,
        prompt_logprobs,
        reason,
        stop_token_id,
        error,
        num_preemptions,
        scheduled,
    ) = fields
    if logprobs != ():
        logprobs = tuple(TokenLogprobs(*one) for one in logprobs)
    if prompt_logprobs != ():
        prompt_logprobs = tuple((token_id, TokenLogprobs(*one)) for token_id, one in prompt_logprobs)
    output = EngineOutput(
        "",
        first_index,
        token_ids,
        logprobs,
        prompt_logprobs,
        reason,
        stop_token_id,
        error,
        num_preemptions,
        scheduled,
    )
    return Entry(checked_key(key), attempt, output)
