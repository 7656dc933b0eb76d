"""One request's line of the audit log, gathered from what passes by. Knows nothing of files."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.types import Message, Receive, Scope, Send

from hybridserve.cluster.access.client_address import Network, client_address
from hybridserve.cluster.access.keys import KeyEntry
from hybridserve.cluster.access.record import RequestRecord
from hybridserve.cluster.ingress.errors import REJECT_REASON_HEADER
from hybridserve.cluster.observe.trail import current_request_id

_REASON = REJECT_REASON_HEADER.encode()
_LONGEST_PATH = 200
# what access logs know for a client that left before there was a status
_CLIENT_LEFT = 499


class AuditEntry:
    """A request from its headers to its end.

    Args:
        networks: of trusted proxies.
        keeps_text: keep the body, and the answers' texts of `record`.
    """

    def __init__(self, scope: Scope, path: str, networks: Sequence[Network], keeps_text: bool) -> None:
        self._scope = scope
        self._path = path
        self._networks = networks
        self._keeps_text = keeps_text
        self._began = time.monotonic()
        self._time = datetime.now(UTC)
        self._body: list[bytes] = []
        self._reason: str | None = None
        self.status = 0
        """Of the answer; 0 while there is none."""
        self.key: KeyEntry | None = None
        self.record: RequestRecord | None = None

    def watch(self, send: Send) -> Send:
        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self._reason = _find(message["headers"], _REASON)
            await send(message)

        return send_noted

    def watch_body(self, receive: Receive) -> Receive:
        if not self._keeps_text:
            return receive

        async def receive_noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._body.append(message.get("body", b""))
            return message

        return receive_noted

    def finish(self) -> tuple[dict[str, object], int]:
        """The line, and about how many bytes of text are in it. The request has ended."""
        record, headers = self.record, self._scope["headers"]
        peer = self._scope.get("client")
        forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
        reasons = {} if record is None else record.finish_reasons
        line: dict[str, object] = {
            "time": self._time.isoformat(timespec="milliseconds"),
            "request_id": current_request_id() or None,
            "answer_id": record and record.answer_id,
            "key": self.key and self.key.name,
            "key_id": self.key and self.key.key_id,
            "client": client_address(peer[0] if peer else None, forwarded, self._networks),
            "method": self._scope["method"],
            "route": self._path[:_LONGEST_PATH],
            "model": record and record.model,
            "prompt_tokens": record.prompt_tokens if record else 0,
            "completion_tokens": record.completion_tokens if record else 0,
            "status": self.status or _CLIENT_LEFT,
            "finish_reasons": [reasons[index] for index in sorted(reasons)],
            "reject_reason": self._reason,
            "duration_s": round(time.monotonic() - self._began, 6),
        }
        if not self._keeps_text:
            return line, 0
        body = b"".join(self._body)
        texts = record.texts if record else {}
        answers = ["".join(texts[index]) for index in sorted(texts)]
        line |= {"request": body.decode("utf-8", "replace"), "answers": answers}
        # a character of text takes one to four bytes in memory
        return line, len(body) + sum(map(len, answers))


def _find(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)
