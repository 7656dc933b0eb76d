"""Server-sent events: how they are written, and a response that ends its source when the client leaves.

Starlette's own StreamingResponse leaves its generator open when the client goes while a chunk is being sent,
and cannot turn a failure before the first chunk into a status.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybridserve.cluster.ingress.disconnect import ClientGone, unless_gone
from hybridserve.cluster.ingress.errors import ApiError, error_response
from hybridserve.cluster.ingress.json_text import string_to_json, to_json

DONE = b"data: [DONE]\n\n"
_HOLE = "\0the text\0"

STALL_S = 60.0

logger = logging.getLogger("ray.serve")


def event(data: object) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


class TextEvent:
    """An event of which nothing but one text changes: all else is made JSON once.

    make: the event's data for a text, which stands in it once.
    """

    def __init__(self, make: Callable[[str], object]) -> None:
        # no JSON that is written here has an escaped NUL of its own, and a client's would be escaped again
        self._before, hole, self._after = event(make(_HOLE)).partition(to_json(_HOLE))
        assert hole and to_json(_HOLE) not in self._after

    def with_text(self, text: str) -> bytes:
        return self._before + string_to_json(text) + self._after


class EventStream(Response):
    """Sends events as they come.

    A failure before the first event is an ordinary error response; later it is one event of OpenAI's error
    shape, and [DONE]: OpenAI's clients raise at the event and read no further, and to others the end of the
    stream is the server's own, not a broken connection. A client that takes no bytes for `stall_s` is gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        report: Callable[[Exception], ApiError],
        stall_s: float = STALL_S,
    ) -> None:
        """
        Args:
            events: complete events; closed when the response ends, however it does.
            report: what the client is told of a failure.
            stall_s: how long one event may wait to be taken; what was queued before it counts.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # its length is not known; the base class wrote that of an empty body
        del self.headers["content-length"]
        self._events = events
        self._report = report
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        progress = SendProgress(send)
        try:
            await unless_gone(
                receive, self._send_all(scope, receive, progress), progress.stalled(self._stall_s)
            )
        except ClientGone:
            return

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            while True:
                try:
                    data = await anext(events, None)
                except Exception as error:
                    told = self._report(error)
                    if not started:
                        await error_response(told)(scope, receive, send)
                        return
                    await _send_body(send, event(told.body()))
                    await _send_body(send, DONE)
                    break
                if data is None:
                    break
                if not started:
                    started = True
                    await self._start(send)
                await _send_body(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


class SendProgress:
    """An ASGI `send` that can tell how long it has been waiting for the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent = 0
        self._waits = False

    async def __call__(self, message: Message) -> None:
        self._waits = True
        await self._send(message)
        self._waits = False
        self._sent += 1

    async def stalled(self, seconds: float) -> None:
        """Returns when one message has waited for that long, up to half as long again."""
        ticks, sent = 0, -1
        while ticks < 5:
            await asyncio.sleep(seconds / 4)
            ticks = ticks + 1 if self._waits and self._sent == sent else 0
            sent = self._sent
        logger.warning("a client took nothing of its stream for %g s; it is cut off", seconds)


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
