"""The whole ingress behind keys: every route, what a key is charged, and the audit line of each end."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.gate import Access
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.access.key_limits import KeyLimiter
from hybridserve.cluster.access.keys import KeyLimits
from hybridserve.cluster.ingress.answer_size import MAX_LOGPROB_ENTRIES
from hybridserve.cluster.ingress.protocol import MAX_MESSAGES
from hybridserve.cluster.pool.interface import PoolBusy, PoolError

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
GOOD = {"prompt": "def f", "max_tokens": 8}
NOW = datetime.now(UTC)
OPEN = {"/health", "/ready"}


class Keyed:
    """An ingress behind the keys of a file; `lines` is its audit log."""

    def __init__(self, make_api, folder: Path) -> None:
        self._make_api = make_api
        self.path = folder / "keys.yaml"
        self.lines: list[dict[str, object]] = []

    def put(self, record: dict[str, object], text_bytes: int = 0) -> None:
        self.lines.append(json.loads(json.dumps(record)))

    def add(self, name: str, **limits: int) -> str:
        return key_edit.add(self.path, name, NOW, limits=KeyLimits(**limits))

    def build(self, keeps_text: bool = False, **options: object):
        """The application; the limits' clock stands still."""
        self.limiter = KeyLimiter(1, lambda: 0.0)
        access = Access(KeyFile(self.path), self.limiter, audit=self, keeps_text=keeps_text)
        return self._make_api(access=access, **options)

    def left(self, name: str) -> int:
        [entry] = [one for one in key_edit.load(self.path) if one.name == name]
        return round(self.limiter.use_of(entry).tokens.level(0.0))


@pytest.fixture
def keyed(make_api, tmp_path: Path) -> Keyed:
    return Keyed(make_api, tmp_path)


def call(api, method: str, path: str, key: str | None = None, **options: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(send())


def test_every_route_but_the_open_ones_needs_a_key(keyed: Keyed) -> None:
    key = keyed.add("team")
    api = keyed.build()
    routes = [(method, route.path) for route in api.routes for method in route.methods]
    assert {path for _, path in routes} > {*OPEN, COMPLETIONS, "/metrics", "/pools", "/", "/v1/models"}
    for method, path in [*routes, ("GET", "/nowhere"), ("PUT", COMPLETIONS), ("GET", "/docs")]:
        path = path.replace("{model:path}", "demo")
        without = call(api, method, path).status_code
        with_key = call(api, method, path, key).status_code
        assert with_key not in (401, 403)
        assert without == (with_key if path in OPEN else 401), (method, path)


def test_openais_client_reads_the_refusal(keyed: Keyed) -> None:
    import openai

    keyed.add("team")
    transport = httpx.ASGITransport(keyed.build())

    async def ask() -> None:
        http = httpx.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="hs-wrong", http_client=http)
        await client.models.list()

    with pytest.raises(openai.AuthenticationError) as refused:
        asyncio.run(ask())
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_a_key_is_charged_what_its_answer_reports(
    keyed: Keyed, path: str, stream: bool, parse_events
) -> None:
    key = keyed.add("team", tokens_per_minute=10_000)
    api = keyed.build()
    body = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "def f"}
    body |= {"max_tokens": 6, "stream": stream}
    if stream and path != GENERATE:
        body |= {"stream_options": {"include_usage": True}}
    response = call(api, "POST", path, key, json=body)
    assert response.status_code == 200
    usage = (parse_events(response.text)[-2] if stream else response.json())["usage"]
    assert keyed.left("team") == 10_000 - usage["total_tokens"]
    [line] = keyed.lines
    assert (line["prompt_tokens"], line["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (line["status"], line["finish_reasons"], line["model"]) == (200, ["length"], "demo")
    assert line["request_id"] == response.headers["x-request-id"]
    if path != GENERATE:
        assert line["answer_id"] in response.text
    # at most the prompt and what was expected of the answer were held while it ran
    left = int(response.headers["x-ratelimit-remaining-tokens"])
    assert 10_000 - usage["prompt_tokens"] - 6 - 256 <= left <= 10_000 - usage["prompt_tokens"]


def test_several_answers_are_one_line(keyed: Keyed) -> None:
    key = keyed.add("team", tokens_per_minute=10_000)
    api = keyed.build(keeps_text=True)
    body = {"prompt": ["def f", "def g"], "n": 2, "max_tokens": 3}
    answer = call(api, "POST", COMPLETIONS, key, json=body).json()
    [line] = keyed.lines
    assert line["finish_reasons"] == ["length"] * 4
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"] == 12
    assert line["answers"] == [choice["text"] for choice in answer["choices"]]
    assert json.loads(line["request"]) == body
    assert keyed.left("team") == 10_000 - answer["usage"]["total_tokens"]


def test_a_key_without_tokens_left_is_told_before_anything_is_computed(keyed: Keyed, pool) -> None:
    key = keyed.add("team", tokens_per_minute=20)
    api = keyed.build()
    long = {"prompt": "def f", "max_tokens": 100}
    assert call(api, "POST", COMPLETIONS, key, json=long).status_code == 200
    for stream in (False, True):
        refused = call(api, "POST", COMPLETIONS, key, json={**GOOD, "stream": stream})
        assert refused.status_code == 429
        assert refused.headers["x-hybridserve-reject-reason"] == "key_tokens"
        assert int(refused.headers["retry-after"]) > 1
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert len(pool.submitted) == 1
    assert [line["reject_reason"] for line in keyed.lines] == [None, "key_tokens", "key_tokens"]


def test_every_way_to_end_is_charged_and_noted(keyed: Keyed, pool) -> None:
    key = keyed.add("team", tokens_per_minute=10_000, max_concurrent=1)
    api = keyed.build()
    cases = (
        ({"prompt": ""}, {}, 400, [], 0),
        (GOOD, {0: PoolBusy("full", 3, "token_budget")}, 429, ["error"], 0),
        (GOOD, {0: PoolError("gone")}, 503, ["error"], 0),
        (GOOD, {0: RuntimeError("broken")}, 500, ["error"], 2),
        ({**GOOD, "stream": True}, {2: PoolError("gone")}, 200, ["error"], 4),
        (GOOD, {}, 200, ["length"], 10),
    )
    spent = 0
    for body, failures, status, reasons, cost in cases:
        pool.failures = failures
        assert call(api, "POST", COMPLETIONS, key, json=body).status_code == status
        line = keyed.lines[-1]
        assert (line["status"], line["finish_reasons"]) == (status, reasons)
        spent += cost
        assert keyed.left("team") == 10_000 - spent, body
    assert [line["reject_reason"] for line in keyed.lines] == [None, "token_budget", *[None] * 4]


def test_a_client_that_leaves_gives_its_place_back(keyed: Keyed, pool) -> None:
    key = keyed.add("team", tokens_per_minute=10_000, max_concurrent=1)
    api = keyed.build()
    pool.stuck_at = 3

    async def leave(stream: bool) -> None:
        body = json.dumps({**GOOD, "stream": stream}).encode()
        sent = pool.sent
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            while pool.sent < sent + 3:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            """Nobody reads it."""

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
        scope |= {"query_string": b"", "client": None, "server": ("x", 80), "scheme": "http", "root_path": ""}
        await api(scope, receive, send)

    for stream in (False, True):
        asyncio.run(asyncio.wait_for(leave(stream), 10))
        line = keyed.lines[-1]
        assert (line["status"], line["finish_reasons"]) == (200 if stream else 499, ["cancelled"])
        assert line["completion_tokens"] == 3
    pool.stuck_at = None
    assert call(api, "POST", COMPLETIONS, key, json=GOOD).status_code == 200
    assert keyed.left("team") == 10_000 - 5 - 5 - 10


def test_answers_of_too_many_logprobs_are_refused(make_caller) -> None:
    caller = make_caller()
    body = {"prompt": ["def f"] * 8, "n": 16, "max_tokens": 200, "logprobs": 64}
    refused = caller.post(COMPLETIONS, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("answer_too_large", "logprobs")
    assert str(8 * 16 * 200 * 65) in error["message"] and str(MAX_LOGPROB_ENTRIES) in error["message"]
    assert caller.post(COMPLETIONS, {**body, "n": 1}).status_code == 200


def test_conversations_of_too_many_messages_are_refused(make_caller) -> None:
    turns = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    for path in (CHAT, "/tokenize"):
        refused = make_caller().post(path, {"messages": turns})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert str(MAX_MESSAGES) in refused.json()["error"]["message"]
