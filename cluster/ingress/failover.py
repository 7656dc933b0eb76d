"""What becomes of a request whose ingress replica ends: sent to another one, or its stream told of the end.

Pure ASGI, for the process that stands before the ingress replicas. Knows nothing of Serve but how an answer
that broke off looks from inside it: the application returns before the answer's beginning, or before its end.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridserve.cluster.ingress.errors import error_response, ingress_failed
from hybridserve.cluster.ingress.sse import DONE, event

_TRIES = 3
_KEPT_BYTES = 8 * 2**20
_ID = re.compile(rb'"id": ?"([^"\\]{1,128})"')

logger = logging.getLogger("ray.serve")


class IngressFailover:
    """Tries a request again while nothing of its answer has come; ends an event stream with an error event.

    A request is safe to repeat: engines drop what an ingress asked for when it ends.

    Args:
        tries: at most; a request that ends ingress replicas ends so many.
        kept_bytes: of a body, until its answer begins; a larger one is not sent again.
    """

    def __init__(self, app: ASGIApp, tries: int = _TRIES, kept_bytes: int = _KEPT_BYTES) -> None:
        self._app = app
        self._tries = tries
        self._kept_bytes = kept_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _KeptRequest(receive, self._kept_bytes)
        answer = _WatchedAnswer(send, request.forget)
        for _ in range(self._tries):
            # Serve writes the route's prefix into it
            await self._app(dict(scope), request.receive_again(), answer.send)
            if answer.started or request.client_left or not request.is_whole:
                break
            logger.warning(
                "%s %s: its ingress replica ended without an answer", scope["method"], scope["path"]
            )
        if request.client_left or answer.ended:
            return
        if not answer.started:
            await error_response(ingress_failed())(scope, receive, send)
        elif answer.is_events:
            logger.warning("%s %s: its ingress replica ended amid the answer", scope["method"], scope["path"])
            await answer.break_off()


class _KeptRequest:
    """A request's body, kept as it is read."""

    def __init__(self, receive: Receive, kept_bytes: int) -> None:
        self._receive = receive
        self._room = kept_bytes
        self._messages: list[Message] = []
        self.client_left = False

    @property
    def is_whole(self) -> bool:
        """Nothing that was read had to be dropped."""
        return self._room >= 0

    def forget(self) -> None:
        """It will not be sent again."""
        self._room = -1
        self._messages.clear()

    def receive_again(self) -> Receive:
        """A `receive` that begins at the beginning."""
        kept: Iterator[Message] = iter(self._messages.copy())

        async def receive() -> Message:
            message = next(kept, None)
            return await self._read() if message is None else message

        return receive

    async def _read(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
        else:
            self._room -= len(message.get("body", b""))
            if self.is_whole:
                self._messages.append(message)
            else:
                self.forget()
        return message


@dataclass
class _WatchedAnswer:
    """How far an answer has come."""

    _send: Send
    _on_start: Callable[[], None]
    started: bool = False
    ended: bool = False
    is_events: bool = False
    _first: bytes = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if not message.get("more_body", False):
                self.ended = True
            elif not self._first:
                self._first = message.get("body", b"")
        elif message["type"] == "http.response.start":
            self.started = True
            self._on_start()
            self.is_events = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        await self._send(message)

    async def break_off(self) -> None:
        """Tell the client, with the id that the answer's events had, and end the answer."""
        error = ingress_failed()
        found = _ID.search(self._first[:4096])
        error.request_id = None if found is None else found[1].decode(errors="replace")
        await self._send({"type": "http.response.body", "body": event(error.body()) + DONE})
