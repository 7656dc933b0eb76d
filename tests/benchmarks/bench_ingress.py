"""What the ingress itself costs: a pool that answers at once, called through ASGI without a socket.

Prints medians, in microseconds of CPU time, of a request with one token and of every further token, for each
endpoint, whole and as a stream; and before that what parts of a token's way cost by themselves, unpacking
the frames of the bus among them, which the pool here does without. Run it on one core:
`taskset -c 0 python tests/benchmarks/bench_ingress.py MODEL_FOLDER`.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from hybridserve.cluster.bus.frames import KEY_BYTES, PREFIX, Entry, pack_entry, pack_news, unpack
from hybridserve.cluster.bus.joined import joined
from hybridserve.cluster.ingress import sse
from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.fast_metrics import FastHistogram
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.answer_text import AnswerText
from hybridserve.replicas.text.tokenizer import Tokenizer

PROMPT = "def mean(values):\n    return sum(values) / len(values)\n"
CHOICES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/generate": {"prompt": PROMPT},
}
TOKENS = 256
ROUNDS = 300


class InstantPool:
    """One token a piece of news, never waiting."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    async def info(self) -> EngineInfo:
        return EngineInfo("qwen3_5_text", 8192, 4096, 256, "float32", "cpu")

    async def ready(self) -> bool:
        return True

    def load(self) -> EngineLoad | None:
        return None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        count = request.params.max_tokens or 1
        yield EngineOutput(request.request_id, first_index=0)
        for i in range(count):
            token_id = self._token_ids[i % len(self._token_ids)]
            reason = "length" if i + 1 == count else None
            yield EngineOutput(request.request_id, i, token_ids=(token_id,), finish_reason=reason)


async def call(api: FastAPI, path: str, body: bytes) -> float:
    """One request; seconds of CPU time."""
    sent_body = False

    async def receive() -> dict[str, object]:
        nonlocal sent_body
        if not sent_body:
            sent_body = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("nobody disconnects")

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    start = time.thread_time()
    await api(scope, receive, send)
    return time.thread_time() - start


async def median(api: FastAPI, path: str, max_tokens: int, *, stream: bool) -> float:
    """Microseconds of a request."""
    body = json.dumps({**CHOICES[path], "max_tokens": max_tokens, "stream": stream}).encode()
    times = [await call(api, path, body) for _ in range(ROUNDS)]
    return statistics.median(times[ROUNDS // 10 :]) * 1e6


def cost(work: Callable[[], object], tokens: int = 1) -> float:
    """Microseconds of CPU time a token, the least of some rounds."""
    repeats = max(1, 20_000 // tokens)
    found = []
    for _ in range(7):
        start = time.thread_time()
        for _ in range(repeats):
            work()
        found.append((time.thread_time() - start) / repeats / tokens * 1e6)
    return min(found)


def parts(tokenizer: Tokenizer) -> dict[str, float]:
    """What one token of a stream costs in each part of its way through the ingress."""
    [token_id] = tokenizer.encode("a")
    streams = 64
    news = EngineOutput("", 0, (token_id,))
    frame = pack_news(None, [pack_entry(Entry(bytes(KEY_BYTES), 0, news))] * streams)[PREFIX.size :]
    text = AnswerText(tokenizer, [token_id], SamplingParams())
    event = sse.TextEvent(
        lambda one: {"id": "cmpl-0", "choices": [{"index": 0, "text": one, "finish_reason": None}]}
    )
    histogram = FastHistogram("a", "a", buckets=[2.0**i for i in range(13)], registry=CollectorRegistry())
    return {
        f"unpacking, {streams} streams a frame": cost(lambda: unpack(frame), streams),
        "joining, 8 behind": cost(lambda: joined([EngineOutput("", i, (token_id,)) for i in range(8)]), 8),
        "text": cost(lambda: text.take(news)),
        "event": cost(lambda: event.with_text("a")),
        "observing": cost(lambda: histogram.observe(5.0)),
    }


async def main(folder: str) -> None:
    tokenizer = Tokenizer.load(folder)
    for name, microseconds in parts(tokenizer).items():
        print(f"{name:38} token {microseconds:6.2f} us")
    pool = InstantPool(tokenizer.encode(PROMPT))
    api = build_api(pool, tokenizer, IngressOptions(model_name="demo"), {})
    for path in CHOICES:
        for stream in (False, True):
            one = await median(api, path, 1, stream=stream)
            many = await median(api, path, TOKENS, stream=stream)
            kind = "stream" if stream else "whole"
            print(f"{path:22} {kind:6} request {one:7.1f} us, token {(many - one) / (TOKENS - 1):6.2f} us")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
