"""What a client is told when something fails: one exception, one JSON shape (OpenAI's), one translation.

Knows nothing of endpoints. Stack traces go to the log, never to the client.
"""

import logging
import re
import reprlib
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from starlette.responses import Response

from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.pool.interface import PoolBusy, PoolError, ReaderTooSlow, ReplicaFailed
from hybridserve.cluster.routing.admission import RejectReason

REJECT_REASON_HEADER = "x-hybridserve-reject-reason"

# a guess: no server is back sooner, and one that is replaced may never be
_RESTART_S = "10"

logger = logging.getLogger(__name__)

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 120


class ApiError(Exception):
    """An answer other than success.

    status: the HTTP status. param: the request's field at fault, if one is. code: a word for programs.
    request_id: of the answer that failed, as its chunks have it; None where none had begun.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.request_id: str | None = None

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.request_id is not None:
            error["request_id"] = self.request_id
        return {"error": error}


def brief(value: object) -> str:
    """`value` as it is shown in an error: short, whatever its length or depth."""
    return _brief.repr(value)


def invalid(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 about one field; `message` is to name the value."""
    return ApiError(400, message, param=param, code=code)


def error_response(error: ApiError) -> Response:
    return Response(
        to_json(error.body()), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def overloaded(message: str, retry_after: str, reason: RejectReason) -> ApiError:
    """A 429 that says when to come back, in whole seconds, and for programs why."""
    headers = {"Retry-After": retry_after, REJECT_REASON_HEADER: reason}
    return ApiError(429, message, code="overloaded", headers=headers)


def ingress_failed() -> ApiError:
    """A 503 by what stands before the ingress replicas: none of them answered, or the one that did ended."""
    message = "the ingress replica that had the request ended; the request may be sent again"
    return ApiError(503, message, code="ingress_failed", headers={"Retry-After": "1"})


def server_stopping() -> ApiError:
    """A 503 for a request that comes, or has not ended, when the server stops."""
    message = "the server is stopping; the request may be sent again, to another server or when it is back"
    return ApiError(503, message, code="server_stopping", headers={"Retry-After": _RESTART_S})


def from_bounds(error: ValueError, aliases: Mapping[str, str] | None = None) -> ApiError:
    """A value refused by `SamplingParams`, whose messages begin with the field's name.

    `aliases` maps that name to the one the client used.
    """
    message = str(error)
    match = re.match(r"\w+", message)
    name = match.group() if match else None
    if name is not None and aliases and name in aliases:
        message = aliases[name] + message[len(name) :]
        name = aliases[name]
    return ApiError(400, message, param=name)


def from_validation(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints about a body."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return invalid(param, f"{param} is not a field of this request", code="unknown_field")
    if first["type"] == "missing":
        return invalid(param, f"{param} is required", code="missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    if not param:
        # a rule over several fields; its message begins with the one at fault
        return from_bounds(ValueError(reason))
    return invalid(param, f"{param}: {reason}, got {brief(first['input'])}")


def _path(loc: Sequence[int | str]) -> str:
    """("messages", 0, "role") as messages[0].role."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path[:200]


class AnswerFailed(Exception):
    """An answer broke off; `__cause__` says why."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the answer {request_id} failed")
        self.request_id = request_id


def translate(error: Exception, retry_after: str) -> ApiError:
    """Any failure of a generation as an answer; what is not foreseen is logged with its trace."""
    if isinstance(error, AnswerFailed):
        assert isinstance(error.__cause__, Exception)
        told = translate(error.__cause__, retry_after)
        told.request_id = error.request_id
        return told
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PoolBusy):
        return overloaded(str(error), str(error.retry_after_s), error.reason)
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, str(error), code="client_too_slow")
    if isinstance(error, ReplicaFailed):
        return ApiError(503, str(error), code="replica_failed", headers={"Retry-After": retry_after})
    if isinstance(error, PoolError):
        return ApiError(503, str(error), code="pool_unavailable", headers={"Retry-After": retry_after})
    logger.error("request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
