"""An HTTP client that tells how an answer ended: well, with an error event, or broken off.

Plain asyncio streams: hundreds at once cost little, and nothing is read ahead or hidden.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field

DONE = "[DONE]"


@dataclass
class Reply:
    """One answer, as far as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[object] = field(default_factory=list)
    """Of a stream: each event's JSON, or "[DONE]"."""
    event_times: list[float] = field(default_factory=list)
    """`time.monotonic` seconds."""
    began: float = 0.0
    ended: float = 0.0
    broken: str = ""
    """Why the connection ended before the answer did."""

    @property
    def text(self) -> str:
        """Of a completion, whole or streamed."""
        parts = self.events if self.events else [json.loads(self.body)]
        return "".join(
            choice["text"] for part in parts if isinstance(part, dict) for choice in part.get("choices", ())
        )

    @property
    def error(self) -> dict[str, object] | None:
        """OpenAI's error object, of a response or of a stream's event."""
        if self.events:
            errors = [one["error"] for one in self.events if isinstance(one, dict) and "error" in one]
            return errors[0] if errors else None
        if not self.body:
            return None
        try:
            return json.loads(self.body).get("error")
        except ValueError:
            # the proxy's own words, when there is no ingress behind it
            return {"message": self.body.decode(errors="replace")}

    @property
    def complete(self) -> bool:
        """All of a good answer is there."""
        whole = not self.events or self.events[-1] == DONE
        return self.status == 200 and not self.broken and self.error is None and whole

    @property
    def first_event_s(self) -> float:
        return self.event_times[0] - self.began

    @property
    def longest_silence_s(self) -> float:
        """Between two events."""
        pairs = zip(self.event_times, self.event_times[1:], strict=False)
        return max((later - sooner for sooner, later in pairs), default=0.0)


class Exchange:
    """One POST, while it lasts. `reply` grows."""

    def __init__(self, host: str, port: int, path: str, body: dict[str, object]) -> None:
        self.reply = Reply()
        self._host, self._port = host, port
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self._request = head.encode() + content

    async def run(self) -> Reply:
        """To the end of the answer or of the connection."""
        reply = self.reply
        reply.began = time.monotonic()
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(self._request)
            await self._read(reader)
        except (OSError, EOFError) as error:
            reply.broken = f"{type(error).__name__}: {error}"
        finally:
            reply.ended = time.monotonic()
            if writer is not None:
                writer.close()
        return reply

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reply = self.reply
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        reply.status = int(status.split()[1])
        reply.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if reply.headers.get("transfer-encoding") != "chunked":
            length = reply.headers.get("content-length")
            reply.body = await (reader.read() if length is None else reader.readexactly(int(length)))
            return
        pending = b""
        while size := int(await reader.readline() or b"-1", 16):
            if size < 0:
                raise EOFError("the body ended before its last chunk")
            pending += await reader.readexactly(size)
            await reader.readexactly(2)
            pending = self._take_events(pending)
        reply.body = pending

    def _take_events(self, pending: bytes) -> bytes:
        """The events that are complete; returns what follows them."""
        if not self.reply.headers.get("content-type", "").startswith("text/event-stream"):
            return pending
        *events, rest = pending.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ").decode()
            self.reply.events.append(data if data == DONE else json.loads(data))
            self.reply.event_times.append(time.monotonic())
        return rest


def completion(prompt: list[int], count: int, stream: bool = True) -> dict[str, object]:
    """The body of a request whose answer `counting_engine.answer` tells."""
    return {"prompt": prompt, "max_tokens": count, "stream": stream, "ignore_eos": True, "temperature": 0}
