"""What stands before every endpoint: headers' size, whose key it is, what that may use, the audit line.

Pure ASGI, as `ingress/limits`. A request that is refused here costs a hash, and no byte of its body is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridserve.cluster.access.audit import AuditLog
from hybridserve.cluster.access.audit_line import AuditEntry
from hybridserve.cluster.access.client_address import Network
from hybridserve.cluster.access.credentials import bearer_key, check_headers, refused, with_allowed_priority
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.access.key_limits import KeyLimiter, KeyUse
from hybridserve.cluster.access.keys import Expired, KeyEntry
from hybridserve.cluster.access.options import ALWAYS_OPEN
from hybridserve.cluster.access.record import RequestRecord, reset_current_record, set_current_record
from hybridserve.cluster.ingress.errors import ApiError, error_response
from hybridserve.cluster.pool.interface import PoolBusy

Report = Callable[[Exception], ApiError]


@dataclass(frozen=True)
class Access:
    """What one ingress replica goes by."""

    keys: KeyFile | None = None
    """None: anybody may use the server."""
    limiter: KeyLimiter = field(default_factory=lambda: KeyLimiter(1))
    audit: AuditLog | None = None
    keeps_text: bool = False
    """Write prompts and answers to the audit log."""
    open_paths: frozenset[str] = ALWAYS_OPEN
    networks: tuple[Network, ...] = ()
    """Of trusted proxies."""


class Gate:
    """Lets through who has a valid key and room left in its limits.

    Open paths need no key, count towards no limit, and have no audit line.
    """

    def __init__(self, app: ASGIApp, access: Access, report: Report) -> None:
        self._app = app
        self._access = access
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket" and self._access.keys is not None:
            # no endpoint is one; should one ever be added, it is not to be open by accident
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = self._access
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if (too_large := check_headers(scope["headers"])) is not None:
            await error_response(self._report(too_large))(scope, receive, send)
        elif path in access.open_paths or (access.keys is None and access.audit is None):
            await self._app(scope, receive, send)
        elif access.audit is None:
            await self._admit(scope, receive, send, None)
        else:
            entry = AuditEntry(scope, path, access.networks, access.keeps_text)
            try:
                await self._admit(scope, entry.watch_body(receive), entry.watch(send), entry)
            except Exception:
                # whoever answers it is outside of this, and says 500
                entry.status = entry.status or 500
                raise
            finally:
                access.audit.put(*entry.finish())

    async def _admit(self, scope: Scope, receive: Receive, send: Send, audit: AuditEntry | None) -> None:
        """Serve the request, or say why not."""
        use: KeyUse | None = None
        try:
            key = self._owner(scope, audit)
            if key is not None:
                scope = with_allowed_priority(scope, key)
                use = self._access.limiter.use_of(key)
                use.enter()
        except (ApiError, PoolBusy) as error:
            answer = error_response(self._report(error))
            await answer(scope, receive, send if use is None else _with_limits(send, use))
            return
        record = RequestRecord(use, keeps_text=audit is not None and self._access.keeps_text)
        if audit is not None:
            audit.record = record
        await self._serve(scope, receive, send, record, use)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord, use: KeyUse | None
    ) -> None:
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if use is not None:
                    message = {**message, "headers": [*message["headers"], *use.headers()]}
            await send(message)

        token = set_current_record(record)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            reset_current_record(token)
            record.settle(status)
            if use is not None:
                use.leave()

    def _owner(self, scope: Scope, audit: AuditEntry | None) -> KeyEntry | None:
        """Whose key the request has; None where no keys are asked for. Raises ApiError, a 401."""
        keys = self._access.keys
        if keys is None:
            return None
        given = bearer_key(scope["headers"])
        found = None if given is None else keys.ring.find(given, datetime.now(UTC))
        if audit is not None and found is not None:
            audit.key = found.entry if isinstance(found, Expired) else found
        if isinstance(found, KeyEntry):
            return found
        raise refused(given is not None, found)


def _with_limits(send: Send, use: KeyUse) -> Send:
    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *use.headers()]}
        await send(message)

    return send_with
