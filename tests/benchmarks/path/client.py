"""A client that costs little: sockets and epoll, events counted in the bytes as they come, nothing parsed.

    python tests/benchmarks/path/client.py PORT < jobs

Each line of standard input is a job in JSON, each line of output its result.
"""

import json
import selectors
import socket
import statistics
import sys
import time

TOKEN = b"~"
_BUFFER = bytearray(2**20)
# above what any round can take
_MANY_TOKENS = 900_000


class Stream:
    """One streamed completion on a connection of its own."""

    def __init__(self, port: int, refusable: bool) -> None:
        self._refusable = refusable
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tokens = 0
        self.events = 0
        self.answered = False
        self.first: float | None = None
        self.refused: float | None = None

    def ask(self) -> None:
        self.socket.sendall(request({"max_tokens": _MANY_TOKENS, "stream": True}))
        self.socket.setblocking(False)

    def read(self) -> None:
        """Take what has come. Raises when it is no stream of events, or has ended."""
        size = self.socket.recv_into(_BUFFER)
        if not size:
            raise ConnectionError(f"a stream ended after {self.tokens} tokens")
        tokens = _BUFFER.count(TOKEN, 0, size)
        if self.refused is not None:
            return
        if not self.answered:
            if self._refusable and _BUFFER.startswith(b"HTTP/1.1 429"):
                self.refused = time.perf_counter()
                return
            self.answered = _BUFFER.startswith(b"HTTP/1.1 200")
            if not self.answered:
                raise ConnectionError(bytes(_BUFFER[:size]).decode(errors="replace"))
        if self.first is None and tokens:
            self.first = time.perf_counter()
        self.tokens += tokens
        self.events += _BUFFER.count(b"data: ", 0, size)


def request(fields: dict[str, object]) -> bytes:
    body = json.dumps({"model": "demo", "prompt": "def f(x):", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Streams:
    """Many of them, begun at once."""

    def __init__(self, port: int, count: int, refusable: bool = False) -> None:
        self._selector = selectors.DefaultSelector()
        self.all = [Stream(port, refusable) for _ in range(count)]
        for stream in self.all:
            self._selector.register(stream.socket, selectors.EVENT_READ, stream)

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in self.all:
            stream.socket.close()
        self._selector.close()

    def read_once(self) -> None:
        for key, _ in self._selector.select(10.0):
            key.data.read()

    def read_until(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            self.read_once()

    def read_until_all_began(self) -> None:
        """Or were refused."""
        while any(stream.first is None and stream.refused is None for stream in self.all):
            self.read_once()

    def counts(self) -> tuple[int, int]:
        return sum(stream.tokens for stream in self.all), sum(stream.events for stream in self.all)


def rate(port: int, streams: int, seconds: float) -> dict[str, float]:
    """Tokens and events a second while all streams run, and this process' CPU time."""
    with Streams(port, streams) as running:
        for stream in running.all:
            stream.ask()
        running.read_until_all_began()
        running.read_until(time.perf_counter() + 1.0)
        print(json.dumps("measuring"), flush=True)
        tokens, events = running.counts()
        began, cpu = time.perf_counter(), time.process_time()
        running.read_until(began + seconds)
        took = time.perf_counter() - began
        more_tokens, more_events = running.counts()
        return {
            "seconds": took,
            "tokens": more_tokens - tokens,
            "events": more_events - events,
            "client_cpu_s": time.process_time() - cpu,
        }


def first_token(port: int, streams: int) -> dict[str, float]:
    """Median milliseconds to the first token of streams that begin at once."""
    with Streams(port, streams) as running:
        began = time.perf_counter()
        for stream in running.all:
            stream.ask()
        running.read_until_all_began()
        return {"ms": statistics.median(stream.first - began for stream in running.all) * 1e3}


def flood(port: int, streams: int) -> dict[str, float]:
    """More at once than there is room for: milliseconds to the first token of those that are admitted, and
    to a refusal."""
    with Streams(port, streams, refusable=True) as running:
        began = time.perf_counter()
        for stream in running.all:
            stream.ask()
        running.read_until_all_began()
        firsts = [(one.first - began) * 1e3 for one in running.all if one.first is not None]
        refusals = [(one.refused - began) * 1e3 for one in running.all if one.refused is not None]
        return {
            "admitted": len(firsts),
            "ms to first token": statistics.median(firsts),
            "slowest first token, ms": max(firsts),
            "refused": len(refusals),
            "ms to refusal": statistics.median(refusals),
            "slowest refusal, ms": max(refusals),
        }


def alone(port: int, requests: int) -> dict[str, float]:
    """Median milliseconds of a request for one token, by one client on one connection."""
    ask = request({"max_tokens": 1})
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(requests):
            began = time.perf_counter()
            connection.sendall(ask)
            answer = b""
            while b'"usage"' not in answer or not answer.endswith((b"}", b"0\r\n\r\n")):
                answer += connection.recv(65536)
            times.append(time.perf_counter() - began)
            assert answer.startswith(b"HTTP/1.1 200"), answer
    return {"ms": statistics.median(times[requests // 10 :]) * 1e3}


JOBS = {"rate": rate, "first_token": first_token, "alone": alone, "flood": flood}


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(JOBS[job.pop("job")](port, **job)), flush=True)


if __name__ == "__main__":
    main()
