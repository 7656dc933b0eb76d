"""The generation requests in flight in one ingress replica, and how they end when the server is to stop.

Knows of a request its task and its trail, nothing of what it asks for.
"""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from hybridserve.cluster.ingress.errors import ApiError, error_response, server_stopping
from hybridserve.cluster.ingress.sse import DONE, event
from hybridserve.cluster.observe.trail import RequestTrail, current_request

Report = Callable[[Exception], ApiError]

# for those that were cut off to tell their clients
_TELL_S = 2.0


class InFlight:
    """Each request is in here from its admission to the end of its response.

    Args:
        on_change: is told how many there are.
    """

    def __init__(self, on_change: Callable[[int], None] = lambda count: None) -> None:
        self._on_change = on_change
        self._requests: dict[asyncio.Task[None], RequestTrail] = {}
        self._cut: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.stopping = False
        """No more requests are to be let in."""

    def __len__(self) -> int:
        return len(self._requests)

    async def serve(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        report: Report,
    ) -> None:
        """Serve one request with `app`; `stop` may cut it off, which its client is then told."""
        task = asyncio.current_task()
        assert task is not None
        self._requests[task] = current_request()
        self._on_change(len(self._requests))
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if task not in self._cut or task.uncancel() > 0:
                raise
            await _tell(report(server_stopping()), self._requests[task], scope, receive, send)
        finally:
            self._cut.discard(task)
            del self._requests[task]
            self._on_change(len(self._requests))
            self._changed.set()

    async def stop(self, limit_s: float) -> int:
        """Let nobody in any more, wait for the requests that are there, and cut off those left at the limit.

        Returns:
            How many were cut off. Their clients have been told, those that still read.
        """
        self.stopping = True
        await self._empty(limit_s)
        for task, trail in self._requests.items():
            # a whole answer that is being sent is all but over
            if trail.streamed or not trail.status:
                self._cut.add(task)
                task.cancel("the server is stopping")
        cut = len(self._cut)
        await self._empty(_TELL_S)
        return cut

    async def _empty(self, limit_s: float) -> None:
        """Returns when no request is left, or at the limit."""
        try:
            async with asyncio.timeout(limit_s):
                while self._requests:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return


async def _tell(error: ApiError, trail: RequestTrail, scope: Scope, receive: Receive, send: Send) -> None:
    """A response, or the last events of one that has begun."""
    if not trail.status:
        await error_response(error)(scope, receive, send)
        return
    error.request_id = trail.answer_id
    await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})
