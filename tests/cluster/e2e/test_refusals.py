"""Bad requests to a real server: each gets a 4xx that names field and value, and leaves nothing behind."""

import json

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle")]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
GOOD = {
    COMPLETIONS: {"model": "demo", "prompt": "hi"},
    CHAT: {"model": "demo", "messages": [USER]},
    "/generate": {"prompt": "hi"},
}
# change of the body, field, what the message shows of the value; for every endpoint that generates
FOR_ALL = [
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": -3}, "max_tokens", "-3"),
    ({"max_tokens": 5000}, "max_tokens", "5000"),
    ({"max_tokens": "many"}, "max_tokens", "'many'"),
    ({"temperature": -0.5}, "temperature", "-0.5"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"temperature": [1]}, "temperature", "[1]"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"stop": [f"stop {i}" for i in range(1000)]}, "stop", "1000"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stop_token_ids": [8192]}, "stop_token_ids", "8192"),
    ({"surprise": 1}, "surprise", "surprise"),
]
CASES = [
    *((path, *case) for path in GOOD for case in FOR_ALL),
    *((path, {"n": 129}, "n", "129") for path in (COMPLETIONS, CHAT)),
    (COMPLETIONS, {"n": 65}, "n", "65"),
    (COMPLETIONS, {"prompt": [5] * 3000}, "prompt", "3000"),
    (COMPLETIONS, {"prompt": "word " * 3000}, "prompt", "2048"),
    (COMPLETIONS, {"prompt": [1, 8192]}, "prompt", "8192"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
    (COMPLETIONS, {"prompt": 7}, "prompt", "7"),
    (COMPLETIONS, {"logit_bias": {"8192": 1}}, "logit_bias", "8192"),
    (CHAT, {"messages": []}, "messages", "[]"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "'wizard'"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "2048"),
    (CHAT, {"messages": "hi"}, "messages", "'hi'"),
]


def check(answer: httpx.Response, status: int, param: str | None, shown: str) -> None:
    """OpenAI's shape, the field, and the value in the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert shown in error["message"], error
    assert error["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=30) as session:
        yield session


@pytest.fixture(scope="module", autouse=True)
def still_answers(server, http: httpx.Client, offline):
    """After all of them the server says what it should, and the engine has run nothing else."""
    server.start_if_stopped()
    steps = server.metrics()["hybridserve_steps_total"]
    yield
    assert server.metrics()["hybridserve_steps_total"] == steps
    [[wanted]] = offline(["def add(a, b):"], temperature=0, max_tokens=8)
    body = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 8}
    assert http.post("/generate", json=body).json()["text"] == wanted.text


@pytest.mark.parametrize(("path", "change", "param", "shown"), CASES, ids=lambda value: str(value)[:30])
def test_a_bad_field(
    http: httpx.Client, path: str, change: dict[str, object], param: str, shown: str
) -> None:
    # Python writes NaN as JSON's own grammar does not allow, as careless clients do
    check(http.post(path, content=json.dumps({**GOOD[path], **change})), 400, param, shown)


@pytest.mark.parametrize("path", GOOD)
def test_an_unknown_model(http: httpx.Client, path: str) -> None:
    check(http.post(path, json={**GOOD[path], "model": "gpt-9"}), 404, "model", "gpt-9")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", [b'{"prompt": ', b"", b"[1, 2]", b'"hi"', b"\xff\xfe"], ids=repr)
def test_malformed_json(http: httpx.Client, path: str, body: bytes) -> None:
    check(http.post(path, content=body), 400, None, "JSON")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_20_mb(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps({"model": "demo", "prompt": "x" * 20_000_000}).encode()
    pieces = (body[i : i + 2**20] for i in range(0, len(body), 2**20))
    check(http.post(COMPLETIONS, content=pieces if chunked else body), 413, None, str(8 * 2**20))


def test_no_such_path_or_method(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404, None, "/v1/nothing")
    check(http.get(COMPLETIONS), 405, None, "POST")
