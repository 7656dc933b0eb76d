"""The ingress' end of the token bus: one listening socket, and a queue for each stream that is waited for.

Knows nothing of HTTP or Ray. An engine's connection is trusted no further than its keys: news of a stream
that nobody registered is dropped and counted.
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hybridserve.cluster.bus.frames import (
    KEY_BYTES,
    PREFIX,
    Cancel,
    FrameError,
    News,
    ReplyTo,
    frame_length,
    pack_cancel,
    unpack,
)
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.replicas.engine.plan import EngineOutput

_HANDSHAKE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass
class Stream:
    """One request's news as they arrive, not yet put in order."""

    reply_to: ReplyTo
    news: asyncio.Queue[EngineOutput | None] = field(default_factory=asyncio.Queue)
    """None is for the stream's owner to put: a wake-up without news."""
    writer: asyncio.StreamWriter | None = None
    """The connection that the last news came by."""
    on_accepted: Callable[[], None] | None = None
    """Called once, when an engine has taken the request and its load counts it."""


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
        tls: of a server; None: in the clear.
    """

    def __init__(
        self, host: str, observer: LoadObserver | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host = host
        self._tls = tls
        self._observer = observer
        self._port = 0
        self._server: asyncio.Server | None = None
        self._streams: dict[bytes, Stream] = {}
        self._loads: dict[asyncio.StreamWriter, ReplicaLoad] = {}
        self._names: dict[asyncio.StreamWriter, str] = {}
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self.dropped_entries = 0

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

    def open_stream(self, attempt: int = 0, on_accepted: Callable[[], None] | None = None) -> Stream:
        assert self._port, "the listener must be started first"
        reply_to = ReplyTo(self._host, self._port, secrets.token_bytes(KEY_BYTES), attempt)
        stream = Stream(reply_to, on_accepted=on_accepted)
        self._streams[reply_to.key] = stream
        return stream

    def close_stream(self, stream: Stream) -> None:
        self._streams.pop(stream.reply_to.key, None)

    def cancel(self, stream: Stream) -> None:
        """Tell the engine that nobody waits any more; before its first news, tell all of them."""
        frame = pack_cancel(Cancel(stream.reply_to.key))
        known = stream.writer in self._connections
        for writer in [stream.writer] if known else list(self._connections):
            writer.write(frame)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            while True:
                body = await reader.readexactly(frame_length(await reader.readexactly(PREFIX.size)))
                self._receive(unpack(body), writer)
        except FrameError as error:
            logger.warning(
                "token bus: dropped a connection from %s: %s", writer.get_extra_info("peername"), error
            )
        except (OSError, EOFError) as error:
            logger.info("token bus: an engine's connection ended: %s", error)
        except asyncio.CancelledError:
            logger.debug("token bus: closed")
        finally:
            self._connections.pop(writer, None)
            self._loads.pop(writer, None)
            self._forget(writer)
            writer.close()

    def _receive(self, message: News | Cancel, writer: asyncio.StreamWriter) -> None:
        if not isinstance(message, News):
            raise FrameError("a cancel, where only news are expected")
        if message.load is not None:
            self._loads[writer] = message.load
            if self._observer is not None:
                self._names[writer] = message.replica
                self._observer.observe(message.replica, message.load)
        for entry in message.entries:
            stream = self._streams.get(entry.key)
            if stream is None or stream.reply_to.attempt != entry.attempt:
                self.dropped_entries += 1
                continue
            stream.writer = writer
            if stream.on_accepted is not None:
                stream.on_accepted()
                stream.on_accepted = None
            stream.news.put_nowait(entry.output)

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        """An engine that dials anew may do so before its old connection is seen to end."""
        name = self._names.pop(writer, None)
        if self._observer is not None and name is not None and name not in self._names.values():
            self._observer.forget(name)
