"""The ingress' end of the token bus: one listening socket, and a stream for each request that is waited for.

Knows nothing of HTTP or Ray. An engine's connection is trusted no further than its keys: news of a stream
that nobody registered are dropped and counted, and what a connection may cost is bounded. Requests go only
to an engine that has shown a pass which it can have from a call alone.
"""

import asyncio
import hmac
import logging
import secrets
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from hybridserve.cluster.bus.frames import (
    KEY_BYTES,
    PREFIX,
    Cancel,
    Entry,
    Failure,
    FrameError,
    Hello,
    News,
    Passes,
    ReplyTo,
    frame_length,
    pack_cancel,
    unpack,
)
from hybridserve.cluster.bus.pace import Pace
from hybridserve.cluster.bus.stream import MAX_UNREAD_TOKENS, Stream
from hybridserve.cluster.bus.submission import MAX_SUBMISSION_BYTES
from hybridserve.cluster.routing.load import ReplicaLoad

# an engine needs one; a pool has at most some hundreds
_MAX_CONNECTIONS = 1024
# an engine says something every second; a machine that lost its power says nothing and closes nothing
_SILENCE_S = 30.0
# larger frames, which follow a broken connection, are read one at a time
_LARGE_FRAME_BYTES = 2**20
# in a row, on one connection: news of streams that were just closed are some hundreds at most
_MAX_UNKNOWN_ENTRIES = 16384
# of requests and cancels, to an engine that does not read them
_MAX_UNSENT_BYTES = 2 * MAX_SUBMISSION_BYTES

_HANDSHAKE_TIMEOUT_S = 5.0
# an engine that lives dials again within 50 ms; of one that does not, clients are to hear within a second
_RETURN_S = 0.3

logger = logging.getLogger(__name__)


class LoadObserver(Protocol):
    """Who follows the replicas' loads."""

    def observe(self, replica: str, load: ReplicaLoad) -> None: ...

    def forget(self, replica: str) -> None:
        """The replica's connection has ended."""


class BusListener:
    """Listens on `host` at a free port from `start` to `close`.

    Args:
        host: of this machine, as engines reach it.
        observer: is told every load, before the news that came with it.
        max_unread_tokens: of one stream; its request is cancelled when its owner reads too slowly.
        silence_s: a connection that sends no whole frame for so long is dropped.
        max_connections: further ones are closed at once.
        tls: of a server; None: in the clear.
    """

    def __init__(
        self,
        host: str,
        observer: LoadObserver | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        silence_s: float = _SILENCE_S,
        max_connections: int = _MAX_CONNECTIONS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._tls = tls
        self._observer = observer
        self._max_unread_tokens = max_unread_tokens
        self._silence_s = silence_s
        self._max_connections = max_connections
        self._port = 0
        self._server: asyncio.Server | None = None
        self._streams: dict[bytes, Stream] = {}
        self._pace = Pace(lambda: bool(self._streams))
        self._loads: dict[asyncio.StreamWriter, ReplicaLoad] = {}
        self._names: dict[asyncio.StreamWriter, str] = {}
        self._unknown: Counter[asyncio.StreamWriter] = Counter()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._large_frames = asyncio.Lock()
        self._passes = Passes(secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES))
        self._engines: dict[str, asyncio.StreamWriter] = {}
        """By the replicas' names; those that have shown the pass."""
        self.counts: Counter[str] = Counter()
        """Entries by what became of them, when that was not delivery: "unknown" (nobody's stream), "attempt"
        (an older attempt's), "duplicate", "gap" (came before what they follow), "overflow"; and connections
        that were "refused" or "dropped"."""

    async def start(self) -> None:
        timeout = None if self._tls is None else _HANDSHAKE_TIMEOUT_S
        self._server = await asyncio.start_server(
            self._serve, self._host, 0, ssl=self._tls, ssl_handshake_timeout=timeout
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections.values():
            task.cancel()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    @property
    def loads(self) -> list[ReplicaLoad]:
        """The last load of every engine that is connected."""
        return list(self._loads.values())

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    def open_stream(
        self, attempt: int = 0, first_index: int = 0, on_accepted: Callable[[], None] | None = None
    ) -> Stream:
        """A stream with a key of its own, which is dropped with `close_stream`."""
        assert self._port, "the listener must be started first"
        reply_to = ReplyTo(self._host, self._port, secrets.token_bytes(KEY_BYTES), attempt, self._passes)
        stream = Stream(reply_to, first_index, on_accepted, self._max_unread_tokens, self._pace)
        self._streams[reply_to.key] = stream
        self._pace.start()
        return stream

    def close_stream(self, stream: Stream) -> None:
        self._streams.pop(stream.reply_to.key, None)

    def submit(self, replica: str, stream: Stream, pack: Callable[[bytes], bytes | None]) -> bool:
        """Send a stream's request to a replica's engine. False: it has to be called.

        `stream.failure` tells of its end without output, also when the engine's connection has ended and does
        not come back. The engine keeps what it has said of it until `cancel` is called for the stream.

        pack: the request's frame with this pass in it, if there is one.
        """
        writer = self._engines.get(replica)
        if writer is None or writer.is_closing():
            return False
        frame = pack(self._passes.ingress)
        if frame is None or writer.transport.get_write_buffer_size() + len(frame) > _MAX_UNSENT_BYTES:
            return False
        stream.writer = writer
        stream.failure = asyncio.get_running_loop().create_future()
        writer.write(frame)
        return True

    def cancel(self, stream: Stream) -> None:
        """Tell the engine that nobody waits any more; before its first news, tell all of them."""
        frame = pack_cancel(Cancel(stream.reply_to.key))
        known = stream.writer in self._connections
        for writer in [stream.writer] if known else list(self._connections):
            self._write(writer, frame)

    def _write(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if writer.is_closing():
            # it has just broken, which its reader is about to learn; uvloop would raise here
            return
        if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.warning("token bus: %s does not read; its connection is dropped", _peer(writer))
            writer.transport.abort()
        else:
            writer.write(frame)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._max_connections:
            self.counts["refused"] += 1
            logger.warning(
                "token bus: %d connections are open, %s is refused", len(self._connections), _peer(writer)
            )
            writer.close()
            return
        self._connections[writer] = asyncio.current_task()
        try:
            while True:
                self._receive(unpack(await self._read_frame(reader)), writer)
        except FrameError as error:
            self.counts["dropped"] += 1
            logger.warning("token bus: dropped a connection from %s: %s", _peer(writer), error)
        except (OSError, EOFError) as error:
            logger.info("token bus: an engine's connection ended: %s", error or type(error).__name__)
        except asyncio.CancelledError:
            logger.debug("token bus: closed")
        finally:
            self._connections.pop(writer, None)
            self._loads.pop(writer, None)
            self._unknown.pop(writer, None)
            self._forget(writer)
            self._lose(writer)
            writer.close()

    async def _read_frame(self, reader: asyncio.StreamReader) -> bytes:
        """Raises FrameError or TimeoutError for what is no frame, or does not come."""
        async with asyncio.timeout(self._silence_s):
            length = frame_length(await reader.readexactly(PREFIX.size))
            if length <= _LARGE_FRAME_BYTES:
                return await reader.readexactly(length)
        async with self._large_frames, asyncio.timeout(self._silence_s):
            return await reader.readexactly(length)

    def _receive(self, message: News | Cancel | Hello | Failure, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, News):
            self._receive_news(message, writer)
        elif isinstance(message, Hello):
            if not hmac.compare_digest(message.token, self._passes.engine):
                raise FrameError("a hello without the pass")
            self._engines[message.replica] = writer
        elif isinstance(message, Failure):
            stream = self._stream_of(message, writer)
            if stream is not None:
                stream.writer = writer
                stream.fail(message)
        else:
            raise FrameError("a cancel, where only news are expected")

    def _receive_news(self, message: News, writer: asyncio.StreamWriter) -> None:
        if message.load is not None:
            self._loads[writer] = message.load
            if self._observer is not None:
                self._names[writer] = message.replica
                self._observer.observe(message.replica, message.load)
        for entry in message.entries:
            stream = self._stream_of(entry, writer)
            if stream is not None:
                self._hand_over(entry, stream, writer)

    def _stream_of(self, news: Entry | Failure, writer: asyncio.StreamWriter) -> Stream | None:
        """Whom it is for; None when nobody waits for it."""
        stream = self._streams.get(news.key)
        if stream is None:
            self._drop_unknown(news.key, writer)
        elif stream.reply_to.attempt != news.attempt:
            self.counts["attempt"] += 1
        else:
            return stream
        return None

    def _hand_over(self, entry: Entry, stream: Stream, writer: asyncio.StreamWriter) -> None:
        stream.writer = writer
        taken = stream.take(entry.output)
        if taken == "new":
            self._unknown.pop(writer, None)
        elif taken != "nothing":
            self.counts[taken] += 1
            if taken == "overflow":
                logger.warning(
                    "token bus: a client reads too slowly: %d tokens of its answer wait for it, token %d "
                    "came; its request is cancelled",
                    self._max_unread_tokens,
                    entry.output.first_index,
                )
                self.cancel(stream)

    def _drop_unknown(self, key: bytes, writer: asyncio.StreamWriter) -> None:
        self.counts["unknown"] += 1
        self._unknown[writer] += 1
        if self._unknown[writer] > _MAX_UNKNOWN_ENTRIES:
            raise FrameError(f"{self._unknown[writer]} news in a row of streams that nobody waits for")
        if writer in self._engines.values():
            # the cancel met a broken connection
            self._write(writer, pack_cancel(Cancel(key)))

    def _lose(self, writer: asyncio.StreamWriter) -> None:
        """A connection has ended: requests that went by it wait for the engine to come back."""
        for name in [name for name, one in self._engines.items() if one is writer]:
            del self._engines[name]
        for stream in self._streams.values():
            if stream.failure is not None and stream.writer is writer:
                stream.writer = None
                asyncio.get_running_loop().call_later(_RETURN_S, self._give_up, stream)

    def _give_up(self, stream: Stream) -> None:
        if stream.writer is None and stream.reply_to.key in self._streams:
            reason = (
                "the engine died or cannot be reached: its connection ended and did not come back "
                f"within {_RETURN_S:g} s"
            )
            stream.fail(Failure(stream.reply_to.key, stream.reply_to.attempt, failed=reason))

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        """An engine that dials anew may do so before its old connection is seen to end."""
        name = self._names.pop(writer, None)
        if self._observer is not None and name is not None and name not in self._names.values():
            self._observer.forget(name)


def _peer(writer: asyncio.StreamWriter) -> object:
    return writer.get_extra_info("peername")
