"""What is decided about a request before an endpoint sees it: headers, size, and whether it may come in.

Pure ASGI: Starlette's BaseHTTPMiddleware would put a queue between an endpoint and its client, and an
endpoint would no longer see the client go.
"""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridserve.cluster.ingress.errors import ApiError, error_response, overloaded, server_stopping
from hybridserve.cluster.ingress.in_flight import InFlight
from hybridserve.cluster.ingress.priority import read_priority
from hybridserve.cluster.pool.interface import PoolBusy
from hybridserve.cluster.routing.admission import Priority

Report = Callable[[Exception], ApiError]
Full = Callable[[Priority], PoolBusy | None]

# Serve lets a client set its own deadline and switch off cancellation with these, and choose among models
# that a replica would load on demand
DROPPED_HEADERS = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve-multiplexed-model-id"}
)
# Serve decodes these before an application sees the request, and answers a bare 500 when it cannot
DECODED_HEADERS = frozenset({b"x-request-id", b"x-session-id", b"traceparent", b"tracestate"})


class DropHeaders:
    """Removes headers that clients may not set, and names of requests and sessions that are not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            kept = [(name, value) for name, value in scope["headers"] if not self._drops(name, value)]
            scope = {**scope, "headers": kept}
        await self._app(scope, receive, send)

    @staticmethod
    def _drops(name: bytes, value: bytes) -> bool:
        # Serve takes an underscore for a hyphen
        name = name.lower().replace(b"_", b"-")
        return name in DROPPED_HEADERS or (name in DECODED_HEADERS and not _is_utf8(value))


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


# of a whole body: one that comes slower holds a place that others could have
BODY_S = 30.0


class BodyLimit:
    """Refuses a body of more than `max_bytes` with 413, at once if it says its length, and one that is not
    there after `max_s` with 408."""

    def __init__(self, app: ASGIApp, max_bytes: int, report: Report, max_s: float = BODY_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._report = report
        self._max_s = max_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            await error_response(self._report(self._too_large(f"{length[:20]} bytes")))(scope, receive, send)
            return
        received, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._max_s

        async def receive_counted() -> Message:
            nonlocal received, is_whole
            if is_whole:
                # whether the client goes, which may take as long as it likes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(received) from None
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    # raised inside the endpoint that reads, and answered as any other error
                    raise self._too_large("more")
            return message

        await self._app(scope, receive_counted, send)

    def _too_slow(self, received: int) -> ApiError:
        return ApiError(
            408,
            f"the body must be there within {self._max_s:g} s, got {received} bytes of it",
            code="body_too_slow",
            headers={"Connection": "close"},
        )

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body must be at most {self._max_bytes} bytes, got {size}",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _path(scope: Scope) -> str:
    """The path below the prefix that the application is mounted at."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


class Admission:
    """Lets so many generation requests in, and answers 429 to the rest; 503 to all when the server stops.

    A place is held until the response has ended, however it ends.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: frozenset[str],
        max_requests: int,
        retry_after: str,
        in_flight: InFlight,
        report: Report,
        full: Full,
    ) -> None:
        """
        Args:
            full: whether the pools would refuse any request of a priority; asked before a body is read.
        """
        self._app = app
        self._full = full
        self._paths = paths
        self._max_requests = max_requests
        self._retry_after = retry_after
        self._in_flight = in_flight
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(self._report(refusal))(scope, receive, send)
            return
        await self._in_flight.serve(self._app, scope, receive, send, self._report)

    def _refusal(self, scope: Scope) -> Exception | None:
        if self._in_flight.stopping:
            return server_stopping()
        if not len(self._in_flight):
            return None
        try:
            # first: the pools count what they refuse, and know when to come again
            busy = self._full(read_priority(Request(scope)))
        except ApiError as error:
            return error
        if busy is None and len(self._in_flight) >= self._max_requests:
            return self._overloaded()
        return busy

    def _overloaded(self) -> ApiError:
        return overloaded(
            f"{len(self._in_flight)} requests are in progress, which is all this server takes "
            f"(max_concurrent_requests {self._max_requests}); try again in {self._retry_after} s",
            self._retry_after,
            "concurrent_requests",
        )
