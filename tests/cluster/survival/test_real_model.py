"""The demo model's answers over HTTP are the same when the replica that had begun them dies on the way."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridserve.cluster.pool import retry
from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.cluster.pool.retry import RetryPolicy
from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig

from ..two_replicas import two_replicas
from .client import Exchange
from .test_in_process import ingress

pytestmark = pytest.mark.anyio

PROMPT = "def add(a, b):\n"
ASKS = {
    "greedy": {"temperature": 0},
    "no seed": {"temperature": 1.0, "top_p": 0.95},
    "seed": {"temperature": 0.8, "seed": 11},
    "two answers": {"temperature": 0.8, "n": 2, "seed": 3},
    "penalties": {"temperature": 0.7, "seed": 2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0, "logprobs": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def told(body_or_events: list[dict]) -> dict[str, object]:
    """The text of each answer, their log-probabilities' tokens, how they ended, and the usage."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    usage = None
    for part in body_or_events:
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            ends[index] = choice["finish_reason"] or ends.get(index, "")
            if choice["logprobs"]:
                tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
    return {"texts": texts, "ends": ends, "tokens": tokens, "usage": usage}


async def test_every_way_of_sampling(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what is drawn for a client without a seed, so that two runs can be compared
    monkeypatch.setattr(retry.secrets, "randbits", lambda bits: 12345)

    def build() -> BuiltEngine:
        config = EngineConfig(
            str(demo_model), device="cpu", cache_memory_bytes=32 * 2**20, num_threads=1, max_model_len=512
        )
        return BuiltEngine(build_engine(config), "cpu", "float32")

    common = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "model": "demo"}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{**common, **ask, **streamed} for ask in ASKS.values()]
    bodies += [{**common, **ASKS["greedy"]}, {**common, **ASKS["two answers"]}]
    async with two_replicas(build, RetryPolicy(10.0)) as pool, ingress(pool, demo_model) as port:

        async def all_of(kill: bool) -> list[dict[str, object]]:
            exchanges = [Exchange("127.0.0.1", port, "/v1/completions", body) for body in bodies]
            tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
            if kill:
                streams = exchanges[: len(ASKS)]
                await pool.until(lambda: all(len(one.reply.events) > 4 for one in streams))
                pool.replicas.kill("a")
                pool.replicas.remove("a")
            replies = await asyncio.gather(*tasks)
            assert all(reply.complete for reply in replies)
            return [
                told(reply.events[:-1] if reply.events else [json.loads(reply.body)]) for reply in replies
            ]

        wanted = await all_of(kill=False)
        assert pool.routed.retries.total() == 0
        assert await all_of(kill=True) == wanted
        assert pool.routed.retries["resumed"] > 0 and not pool.routed.retries["failed"]
        by_name = dict(zip(ASKS, wanted, strict=False))
        assert [by_name["greedy"], by_name["two answers"]] == wanted[-2:]
