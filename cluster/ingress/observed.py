"""Follows every HTTP request from its first byte to its last: its id, its log line, its trace, its count.

Pure ASGI, outermost but for what cuts headers off; see `limits` for why.
"""

import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridserve.cluster.ingress.metrics import IngressMetrics
from hybridserve.cluster.observe.logs import log_event
from hybridserve.cluster.observe.trail import RequestTrail, follow

if TYPE_CHECKING:
    # imported where tracing is on
    from hybridserve.cluster.observe.traces import RequestTracer

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNREADABLE = re.compile(r"[^\x21-\x7e]")
_OTHER = "other"
_HEADER = b"x-request-id"

logger = logging.getLogger(__name__)


class Observed:
    """The outermost layer.

    Args:
        routes: paths that are told apart; others count as one.
        quiet: those of them whose lines are for debugging only.
        tracer: is given every finished request; None: no traces.
        name_requests: answer with an `x-request-id`; a server in front of this one may have done so.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Collection[str],
        quiet: Collection[str],
        metrics: IngressMetrics,
        tracer: "RequestTracer | None",
        name_requests: bool,
    ) -> None:
        self._app = app
        self._routes = frozenset(routes)
        self._quiet = frozenset(quiet)
        self._metrics = metrics
        self._tracer = tracer
        self._name_requests = name_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trail = self._begin(scope)
        follow(trail)
        # whoever looks at the request further in sees the id that its client is told
        headers = [(name, value) for name, value in scope["headers"] if name != _HEADER]
        scope = {**scope, "headers": [*headers, (_HEADER, trail.request_id.encode())]}

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                trail.status = message["status"]
                headers = MutableHeaders(scope=message)
                trail.streamed = headers.get("content-type", "").startswith("text/event-stream")
                if self._name_requests:
                    headers["x-request-id"] = trail.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._end(trail)

    def _begin(self, scope: Scope) -> RequestTrail:
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        return RequestTrail(
            request_id=self._request_id(headers.get("x-request-id", "")),
            method=scope["method"],
            route=path if path in self._routes else _OTHER,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )

    def _request_id(self, given: str) -> str:
        """The client's own name for it if it is a plain one."""
        if _REQUEST_ID.fullmatch(given):
            return given
        if given and not self._name_requests:
            # whoever answers with it has taken it as it is; only the log is to be kept readable
            return _UNREADABLE.sub("?", given)[:128]
        return uuid.uuid4().hex

    def _end(self, trail: RequestTrail) -> None:
        trail.ended = time.monotonic()
        self._metrics.count_http(trail.route, trail.status)
        trace_id = "" if self._tracer is None else self._tracer.record(trail)
        log_event(
            logger,
            _level(trail, trail.route in self._quiet),
            "request",
            f"{trail.method} {trail.route} {trail.status or 'cancelled'}",
            request_id=trail.request_id,
            trace_id=trace_id,
            method=trail.method,
            route=trail.route,
            status=trail.status,
            duration_s=round(trail.ended - trail.began, 6),
            **_answer_fields(trail),
        )


def _level(trail: RequestTrail, quiet: bool) -> int:
    if trail.status >= 500:
        return logging.WARNING
    return logging.DEBUG if quiet else logging.INFO


def _answer_fields(trail: RequestTrail) -> dict[str, object]:
    """What the answers have in common, or add up to; nothing for a request without any."""
    answers = trail.answers
    if not answers:
        return {}
    first_tokens = [answer.first_token for answer in answers if answer.first_token is not None]
    queues = [begun - one.sent for one in answers if (begun := trail.scheduled(one)) is not None]
    return {
        "stream": trail.streamed,
        "answers": len(answers),
        "priority": answers[0].priority,
        "pool": ",".join(sorted({answer.pool for answer in answers} - {""})),
        # `replica` is this ingress' own
        "pool_replica": ",".join(sorted({answer.replica for answer in answers} - {""})),
        "attempts": max(answer.attempt for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "generation_tokens": sum(answer.generation_tokens for answer in answers),
        "preemptions": sum(answer.preemptions for answer in answers),
        "ttft_s": round(min(first_tokens) - trail.began, 6) if first_tokens else None,
        "queue_s": round(max(queues), 6) if queues else None,
        "finish_reason": ",".join(sorted({answer.finish_reason for answer in answers} - {""})),
    }
