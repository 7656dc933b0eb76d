"""What a refusal costs the ingress: CPU time of a 429, called through ASGI without a socket or Serve.

Prints medians in microseconds for prompts of several lengths: refused before the body is read, as every pool
is full, and after (what a pool's own refusal costs, when another pool has room).
`python tests/benchmarks/survival/refusals.py configs/demo-model`
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator

from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolBusy
from hybridserve.cluster.routing.admission import Admission, Priority
from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.text.tokenizer import Tokenizer

LINE = "def mean(values):\n    return sum(values) / len(values)\n"
ROUNDS = 300


class StuckPool:
    """Its answers never come."""

    async def info(self) -> EngineInfo:
        return EngineInfo("qwen3_5_text", 8192, 65536, 256, "float32", "cpu")

    async def ready(self) -> bool:
        return True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        await asyncio.Event().wait()
        yield EngineOutput(request.request_id, 0)


class ReadsFirst(LengthRouter):
    """Refuses only what it has read."""

    def full(self, priority: Priority) -> PoolBusy | None:
        return None


def full_router(kind: type[LengthRouter]) -> LengthRouter:
    limits = PoolLimits(4, 10**6, 30.0, 0.9, 0.5)
    spec = PoolSpec("pool", 0, None, 1, ReplicaRange(1, 1), (), limits)
    loads = PoolLoads()
    for index in range(3):
        loads.book(f"held-{index}", Cost(100, 100))
    return kind([RoutedPool(spec, StuckPool(), loads, Admission("pool", limits, 1))])


async def call(api, body: bytes) -> tuple[int, float]:
    """One request: its status, and seconds of CPU time."""
    status = 0
    sent_body = False

    async def receive() -> dict[str, object]:
        nonlocal sent_body
        if sent_body:
            await asyncio.Event().wait()
        sent_body = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, object]) -> None:
        nonlocal status
        status = message.get("status", status)

    path = "/v1/completions"
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
    began = time.process_time()
    await api(scope, receive, send)
    return status, time.process_time() - began


async def measure(kind: type[LengthRouter], tokenizer: Tokenizer, characters: int) -> float:
    """Microseconds of a refusal."""
    api = build_api(full_router(kind), tokenizer, IngressOptions(model_name="demo"), {})
    prompt = (LINE * (characters // len(LINE) + 1))[:characters]
    body = json.dumps({"prompt": prompt, "max_tokens": 100, "stream": True}).encode()
    # takes the pool's last place and holds it
    holder = asyncio.create_task(call(api, body))
    await asyncio.sleep(0.2)
    times = []
    for _ in range(ROUNDS):
        status, seconds = await call(api, body)
        if status != 429:
            raise RuntimeError(f"a full pool answered {status}")
        times.append(seconds)
    holder.cancel()
    return statistics.median(times[ROUNDS // 10 :]) * 1e6


async def main(folder: str) -> None:
    tokenizer = Tokenizer.load(folder)
    for characters in (60, 4_000, 40_000):
        read = await measure(ReadsFirst, tokenizer, characters)
        unread = await measure(LengthRouter, tokenizer, characters)
        print(f"prompt of {characters:6} characters: read first {read:8.0f} us, not read {unread:6.0f} us")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
