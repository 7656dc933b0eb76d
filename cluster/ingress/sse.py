"""Server-sent events: how they are written, and a response that ends its source when the client leaves.

Starlette's own StreamingResponse leaves its generator open when the client goes while a chunk is being sent,
and cannot turn a failure before the first chunk into a status.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridserve.cluster.ingress.disconnect import ClientGone, unless_gone
from hybridserve.cluster.ingress.errors import ApiError, error_response
from hybridserve.cluster.ingress.json_text import string_to_json, to_json

DONE = b"data: [DONE]\n\n"
_HOLE = "\0the text\0"


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
    shape, and the stream ends there.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], report: Callable[[Exception], ApiError]) -> None:
        """
        Args:
            events: complete events; closed when the response ends, however it does.
            report: what the client is told of a failure.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # its length is not known; the base class wrote that of an empty body
        del self.headers["content-length"]
        self._events = events
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, receive, send))
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


async def _send_body(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
