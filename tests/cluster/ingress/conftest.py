"""A pool without an engine, and ways to call an ingress built over it: in-process, and over a real socket."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from hybridserve.cluster.access.gate import Access
from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.ingress.service import Observers
from hybridserve.cluster.observe.trail import current_answer
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolBusy
from hybridserve.cluster.routing.admission import Priority
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.state import PoolState
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs
from hybridserve.replicas.text.tokenizer import Tokenizer

MODEL_FOLDER = Path(__file__).parents[3] / "configs" / "demo-model"
MODEL = "demo"
POOL = "only"
CONTEXT = 256
VOCABULARY = 8192
END = 2
"""<|im_end|>"""


class FakePool:
    """Answers with tokens that follow from the prompt and the seed; can be slow, stuck or broken."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text: str | None = None
        """The whole answer, if the test wants a certain one."""
        self.tokens_per_news = 1
        self.step_seconds = 0.0
        self.scheduled_after: float = 0.0
        """Seconds from a request's coming to what its engine's clock says of its beginning."""
        self.stuck_at: int | None = None
        """Index of the token that never comes."""
        self.failures: dict[int, Exception] = {}
        """By index of the token in whose place it is raised."""
        self.engine_error_at: int | None = None
        self.rejection: PoolBusy | None = None
        """What every request is refused with."""
        self.is_ready: bool | Exception = True
        self.info_failure: Exception | None = None
        self.engine_load: ReplicaLoad | None = None
        self.pool_states: list[PoolState] = []
        self.fullness: dict[Priority, PoolBusy] = {}
        self.submitted: list[GenerationRequest] = []
        self.ended: dict[str, float] = {}
        """`time.monotonic` seconds at which each request's iterator ended or was closed."""
        self.sent = 0

    async def info(self) -> EngineInfo:
        if self.info_failure is not None:
            raise self.info_failure
        return EngineInfo("qwen3_5_text", VOCABULARY, CONTEXT, 16, "float32", "cpu")

    async def ready(self) -> bool:
        if isinstance(self.is_ready, Exception):
            raise self.is_ready
        return self.is_ready

    def full(self, priority: Priority) -> PoolBusy | None:
        return self.fullness.get(priority)

    def pools(self) -> list[PoolState]:
        return self.pool_states

    def load(self) -> ReplicaLoad | None:
        return self.engine_load

    async def refresh_load(self) -> None:
        """Nothing to ask."""

    def answer(self, request: GenerationRequest) -> list[int]:
        """The tokens up to and with the end, or to `max_tokens`."""
        text = self.text
        if text is None:
            text = f" é {sum(request.prompt_token_ids)} naïve 🙂🙃 {request.params.seed} done"
        ids = [*self.tokenizer.encode(text), END]
        return ids[: request.params.max_tokens]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        self.submitted.append(request)
        if self.rejection is not None:
            raise self.rejection
        # as the length router does, where it takes a request
        current_answer().pool = POOL
        try:
            ids = self.answer(request)
            yield EngineOutput(request.request_id, first_index=0)
            scheduled = time.time() + self.scheduled_after
            for first in range(0, len(ids), self.tokens_per_news):
                await self._step(first)
                if self.engine_error_at == first:
                    yield EngineOutput(
                        request.request_id, first, finish_reason="error", error="NaN in logits"
                    )
                    return
                self.sent += 1
                yield replace(self._news(request, first, ids), first_scheduled_time=scheduled)
        finally:
            self.ended[request.request_id] = time.monotonic()

    async def _step(self, index: int) -> None:
        if index in self.failures:
            raise self.failures[index]
        if index == self.stuck_at:
            await asyncio.Event().wait()
        if self.step_seconds:
            await asyncio.sleep(self.step_seconds)

    def _news(self, request: GenerationRequest, first: int, ids: list[int]) -> EngineOutput:
        new = tuple(ids[first : first + self.tokens_per_news])
        finish_reason = None
        if first + len(new) == len(ids):
            finish_reason = "stop" if ids[-1] == END else "length"
        prompt = request.prompt_token_ids
        wants_prompt = request.params.prompt_logprobs is not None and first == 0
        return EngineOutput(
            request.request_id,
            first,
            token_ids=new,
            logprobs=() if request.params.logprobs is None else tuple(map(fake_logprobs, new)),
            prompt_logprobs=tuple((i, fake_logprobs(i)) for i in prompt[1:]) if wants_prompt else (),
            finish_reason=finish_reason,
        )


def fake_logprobs(token_id: int) -> TokenLogprobs:
    """The chosen token is second; the third cannot happen."""
    others = ((token_id + 1) % VOCABULARY, token_id, (token_id + 2) % VOCABULARY)
    return TokenLogprobs(-1.5, 2, others, (-0.25, -1.5, float("-inf")))


class Caller:
    """Calls an application in-process."""

    def __init__(self, api: FastAPI) -> None:
        self.api = api

    def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        content: bytes | Callable[[], AsyncGenerator[bytes, None]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send `body` as JSON (NaN included), or `content` as it is."""
        if body is not None:
            content = json.dumps(body).encode()

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.api)
            async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
                data = content() if callable(content) else content
                return await client.request(method, path, content=data, headers=headers)

        return asyncio.run(send())

    def post(self, path: str, body: object) -> httpx.Response:
        return self.request("POST", path, body=body)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def events(self, path: str, body: dict[str, object]) -> list[object]:
        """The events of a stream, its [DONE] checked and left out."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = read_events(response.text)
        assert events[-1] == "[DONE]"
        return events[:-1]


def read_events(text: str) -> list[object]:
    """Every event's data, parsed unless it is [DONE]."""
    assert text.endswith("\n\n")
    out: list[object] = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_FOLDER)


@pytest.fixture
def pool(tokenizer: Tokenizer) -> FakePool:
    return FakePool(tokenizer)


@pytest.fixture
def make_api(pool: FakePool, tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    """An application over `pool`; keywords are IngressOptions, `defaults`, `observers` or `access`."""

    def make(
        defaults: dict[str, object] | None = None,
        observers: Observers | None = None,
        access: Access | None = None,
        **options: object,
    ) -> FastAPI:
        known = IngressOptions(model_name=MODEL, **options)
        return build_api(pool, tokenizer, known, defaults or {}, observers, access)

    return make


@pytest.fixture
def caller(make_api: Callable[..., FastAPI]) -> Caller:
    return Caller(make_api())


@pytest.fixture
def make_caller(make_api: Callable[..., FastAPI]) -> Callable[..., Caller]:
    return lambda **options: Caller(make_api(**options))


@pytest.fixture
def parse_events() -> Callable[[str], list[object]]:
    return read_events


@pytest.fixture
def serve(make_api: Callable[..., FastAPI]) -> Iterator[Callable[..., int]]:
    """Start a real server over `pool` on a port of the system's choice, which is returned."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**options: object) -> int:
        config = uvicorn.Config(make_api(**options), host="127.0.0.1", port=0, log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        return server.servers[0].sockets[0].getsockname()[1]

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive()
