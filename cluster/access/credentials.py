"""What a request's headers say of who sends it, and the errors about that. Knows no limits or files."""

from collections.abc import Sequence

from starlette.types import Scope

from hybridserve.cluster.access.keys import Expired, KeyEntry
from hybridserve.cluster.ingress.errors import ApiError, brief
from hybridserve.cluster.ingress.priority import HEADER as PRIORITY_HEADER
from hybridserve.cluster.routing.admission import PRIORITIES

# far above what any client sends; Serve's proxy itself has no limit
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 2**10

_SCHEME = b"bearer"
_PRIORITY = PRIORITY_HEADER.encode()
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hybridserve"'}

RawHeaders = Sequence[tuple[bytes, bytes]]


def check_headers(headers: RawHeaders) -> ApiError | None:
    """A 431 when there are too many headers, or they are too long; else None."""
    count = len(headers)
    size = sum([len(name) + len(value) for name, value in headers])
    if count <= MAX_HEADERS and size <= MAX_HEADER_BYTES:
        return None
    return ApiError(
        431,
        f"a request may have {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in all, got {count} of {size}",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


def bearer_key(headers: RawHeaders) -> bytes | None:
    """The key of `Authorization: Bearer KEY`; None without one, or when there are several such headers."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].strip().partition(b" ")
    key = key.strip()
    return key if scheme.lower() == _SCHEME and key else None


def refused(has_key: bool, found: Expired | None) -> ApiError:
    """The 401 of a request without a valid key; nothing in it tells an unknown key from a revoked one."""
    if found is not None:
        message = "this API key has expired"
    elif has_key:
        message = "this API key is not valid"
    else:
        message = "an API key is required, as `Authorization: Bearer KEY`"
    return ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)


def with_allowed_priority(scope: Scope, key: KeyEntry) -> Scope:
    """The scope with a priority that the key may use: the key's own where the client asked for none.

    Raises:
        ApiError: 403; the client asked for a higher one.
    """
    if key.priority == PRIORITIES[0]:
        return scope
    given = next((value for name, value in scope["headers"] if name.lower() == _PRIORITY), None)
    if given is None:
        if key.priority == "normal":
            return scope
        return {**scope, "headers": [*scope["headers"], (_PRIORITY, key.priority.encode())]}
    asked = given.decode("latin-1").strip().lower()
    # a word that is no priority is told so by who reads it
    if asked in PRIORITIES and PRIORITIES.index(asked) < PRIORITIES.index(key.priority):
        raise ApiError(
            403,
            f"this API key may use {PRIORITY_HEADER} up to {key.priority}, got {brief(asked)}",
            param=PRIORITY_HEADER,
            code="priority_not_allowed",
        )
    return scope
