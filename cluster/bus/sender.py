"""The engine's end of the token bus: dials each ingress once, and never lets a slow one hold anybody up.

Owns connections, their bounded backlogs and redialling. Knows nothing of engines. Everything here runs on one
event loop; `send` never waits.
"""

import asyncio
import contextlib
import hmac
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Collection

from hybridserve.cluster.bus.frames import (
    MAX_CANCEL_BYTES,
    MAX_FRAME_BYTES,
    PREFIX,
    FrameError,
    Hello,
    Passes,
    frame_length,
    pack_hello,
    pack_news,
)
from hybridserve.cluster.bus.submission import MAX_SUBMISSION_BYTES, Submission, unpack_order
from hybridserve.cluster.routing.load import ReplicaLoad

Address = tuple[str, int]

_IDLE_S = 1.0
_DIAL_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 5.0
_REDIAL_S = (0.05, 0.2, 0.5, 1.0)
# by a host that took our connection before: nothing listens there any more, so that process has ended
_REFUSALS_OF_THE_DEAD = 4

logger = logging.getLogger(__name__)


class Channel:
    """The way to one ingress: a backlog of frames and the task that writes them.

    `epoch` grows whenever something may have been lost (a broken connection, an overflowing backlog). When
    frames go out again, `catch_up` is called until it returns False: it is to send all of the streams' news
    again, a part at a time, and nothing else is to be said of a stream before that. A peer that takes no
    bytes for `write_timeout_s` is dialled anew.
    """

    def __init__(
        self,
        address: Address,
        on_cancel: Callable[[bytes], None],
        load_frame: Callable[[], bytes],
        max_backlog_bytes: int,
        idle_s: float,
        write_timeout_s: float,
        on_gone: Callable[["Channel"], None],
        tls: ssl.SSLContext | None = None,
        passes: Passes | None = None,
        replica: str = "",
        on_submission: Callable[["Channel", Submission], None] = lambda channel, submission: None,
        catch_up: Callable[["Channel"], bool] = lambda channel: False,
    ) -> None:
        self.address = address
        self._tls = tls
        self._passes = passes
        self._replica = replica
        self._on_submission = on_submission
        self._catch_up = catch_up
        self._behind = False
        self.epoch = 0
        self.streams = 0
        self.dropped_frames = 0
        self._on_cancel = on_cancel
        self._load_frame = load_frame
        self._max_backlog_bytes = max_backlog_bytes
        self._idle_s = idle_s
        self._write_timeout_s = write_timeout_s
        self._on_gone = on_gone
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def closed(self) -> bool:
        return self._task.done()

    def send(self, frame: bytes) -> None:
        """Queue a frame, or lose the whole backlog when it has become too long."""
        if self._backlog_bytes + len(frame) > self._max_backlog_bytes:
            self.dropped_frames += 1
            self._lose_backlog()
            return
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _lose_backlog(self) -> None:
        self.dropped_frames += len(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self.epoch += 1
        self._behind = True
        self._wake.set()

    async def _run(self) -> None:
        """Dial, write until the connection breaks, dial again as long as a stream needs it."""
        failures = refusals = brief = 0
        reached = False
        while failures == 0 or self.streams > 0:
            try:
                async with asyncio.timeout(_DIAL_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*self.address, ssl=self._tls)
            except (OSError, TimeoutError) as error:
                if failures == 0:
                    logger.warning("token bus: cannot reach the ingress at %s:%d: %s", *self.address, error)
                refusals += isinstance(error, ConnectionRefusedError)
                if reached and refusals == _REFUSALS_OF_THE_DEAD:
                    logger.warning("token bus: the ingress at %s:%d has ended", *self.address)
                    self._on_gone(self)
                await asyncio.sleep(_REDIAL_S[min(failures, len(_REDIAL_S) - 1)])
                failures += 1
                continue
            failures = refusals = 0
            reached = True
            began = time.monotonic()
            await self._talk(reader, writer)
            self._lose_backlog()
            if self.streams == 0:
                return
            brief = brief + 1 if time.monotonic() - began < _REDIAL_S[-1] else 0
            if brief:
                # a server that refuses our certificate hangs up only after the handshake
                await asyncio.sleep(_REDIAL_S[min(brief, len(_REDIAL_S)) - 1])
            if brief == 2:
                logger.warning("token bus: the ingress at %s:%d hangs up at once", *self.address)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write the backlog and read cancels until either way breaks."""
        halves = [asyncio.create_task(self._write(writer)), asyncio.create_task(self._read(reader))]
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for half in halves:
                half.cancel()
            for result in await asyncio.gather(*halves, return_exceptions=True):
                if isinstance(result, FrameError | TimeoutError):
                    logger.warning("token bus: dropped the connection to %s:%d: %s", *self.address, result)
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        if self._passes is not None:
            writer.write(pack_hello(Hello(self._passes.engine, self._replica)))
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._wake.wait()
            except TimeoutError:
                self.send(self._load_frame())
            self._wake.clear()
            while self._backlog or self._behind:
                if not self._backlog:
                    # it may itself be too much, and set this again
                    self._behind = False
                    self._behind |= self._catch_up(self)
                    continue
                frame = self._backlog.popleft()
                self._backlog_bytes -= len(frame)
                writer.write(frame)
                await self._drain(writer)

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writer.drain()
        except TimeoutError:
            raise TimeoutError(f"it took no bytes for {self._write_timeout_s:g} s") from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        limit = MAX_CANCEL_BYTES if self._passes is None else MAX_SUBMISSION_BYTES
        while True:
            prefix = await reader.readexactly(PREFIX.size)
            message = unpack_order(await reader.readexactly(frame_length(prefix, limit)))
            if not isinstance(message, Submission):
                self._on_cancel(message.key)
            elif self._passes is not None and hmac.compare_digest(message.token, self._passes.ingress):
                self._on_submission(self, message)
            else:
                raise FrameError("a request by somebody who does not know the pass")


class BusSender:
    """All channels of one engine.

    Args:
        on_cancel: called with a stream's key when an ingress has given it up.
        load: gives the load for a frame's header.
        max_backlog_bytes: unsent bytes an ingress may let pile up before its backlog is dropped.
        idle_s: seconds of silence after which a frame with the load alone is sent.
        replica: the name that routing knows this engine by.
        write_timeout_s: how long an ingress may take no bytes before its connection is dropped.
        on_gone: called when an ingress that was reached has ended; its streams are nobody's.
        tls: of a client; None: in the clear.
        on_submission: called with a request that an ingress has sent by its channel.
        catch_up: see `Channel`.
    """

    def __init__(
        self,
        on_cancel: Callable[[bytes], None],
        load: Callable[[], ReplicaLoad | None],
        max_backlog_bytes: int = 2 * MAX_FRAME_BYTES,
        idle_s: float = _IDLE_S,
        replica: str = "",
        write_timeout_s: float = _WRITE_TIMEOUT_S,
        on_gone: Callable[[Channel], None] = lambda channel: None,
        tls: ssl.SSLContext | None = None,
        on_submission: Callable[[Channel, Submission], None] = lambda channel, submission: None,
        catch_up: Callable[[Channel], bool] = lambda channel: False,
    ) -> None:
        self._on_cancel = on_cancel
        self._on_submission = on_submission
        self._catch_up = catch_up
        self._load = load
        self._write_timeout_s = write_timeout_s
        self._on_gone = on_gone
        self._max_backlog_bytes = max_backlog_bytes
        self._idle_s = idle_s
        self._replica = replica
        self._tls = tls
        self._channels: dict[Address, Channel] = {}

    def open_stream(self, address: Address, passes: Passes | None = None) -> Channel:
        """The channel to `address`, kept up until as many `close_stream` calls.

        passes: the ingress may send requests by it.
        """
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            channel = Channel(
                address,
                self._on_cancel,
                self._load_frame,
                self._max_backlog_bytes,
                self._idle_s,
                self._write_timeout_s,
                self._on_gone,
                self._tls,
                passes,
                self._replica,
                self._on_submission,
                self._catch_up,
            )
            self._channels[address] = channel
        channel.streams += 1
        return channel

    def join_stream(self, channel: Channel) -> None:
        """One more stream, of a channel that it came by."""
        channel.streams += 1

    def close_stream(self, channel: Channel) -> None:
        channel.streams -= 1
        if channel.closed and self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def send(self, channel: Channel, packed_entries: list[bytes]) -> None:
        """Send entries as one frame if they fit in one; an entry longer than a frame is lost."""
        try:
            channel.send(pack_news(self._load(), packed_entries, self._replica))
        except FrameError as error:
            if len(packed_entries) == 1:
                logger.warning("token bus: %s", error)
                channel.dropped_frames += 1
                return
            half = len(packed_entries) // 2
            self.send(channel, packed_entries[:half])
            self.send(channel, packed_entries[half:])

    def send_load(self, but: Collection[Channel] = ()) -> None:
        """Tell every ingress but these the load at once, instead of after `idle_s`."""
        others = [one for one in self._channels.values() if not one.closed and one not in but]
        if others:
            frame = self._load_frame()
            for channel in others:
                channel.send(frame)

    def _load_frame(self) -> bytes:
        return pack_news(self._load(), [], self._replica)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
