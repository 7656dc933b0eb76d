"""Size, admission, and headers."""

import asyncio
import json
import socket

import httpx
import pytest

from hybridserve.cluster.ingress.errors import ApiError
from hybridserve.cluster.ingress.limits import BodyLimit, DropHeaders
from hybridserve.cluster.ingress.options import IngressOptions

COMPLETIONS = "/v1/completions"
GOOD = {"prompt": "def f", "max_tokens": 8}
TWENTY_MB = 20 * 1000 * 1000


def test_a_body_of_20_mb(caller):
    content = json.dumps({"prompt": "x" * TWENTY_MB}).encode()
    response = caller.request("POST", COMPLETIONS, content=content)
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large"
    assert str(len(content)) in error["message"]
    assert str(8 * 1024 * 1024) in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate", "/tokenize"])
def test_a_chunked_body_is_stopped_on_the_way(caller, path):
    sent = 0

    async def chunks():
        nonlocal sent
        while sent < TWENTY_MB:
            sent += 1 << 20
            yield b" " * (1 << 20)

    response = caller.request("POST", path, content=chunks)
    assert response.status_code == 413
    assert sent <= 10 << 20


def test_a_declared_size_is_refused_before_any_of_it_is_sent(serve):
    with socket.create_connection(("127.0.0.1", serve()), timeout=5) as client:
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {TWENTY_MB}\r\n\r\n".encode()
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_the_limit_is_exact(make_caller):
    content = json.dumps(GOOD).encode()
    assert make_caller(max_body_bytes=len(content)).request("POST", COMPLETIONS, content=content).is_success
    small = make_caller(max_body_bytes=len(content) - 1)
    assert small.request("POST", COMPLETIONS, content=content).status_code == 413


async def slow_body(api: BodyLimit, *messages: dict) -> list[dict]:
    """What a client is sent for these messages, of which nothing follows."""
    waiting = iter(messages)

    async def receive() -> dict:
        message = next(waiting, None)
        return message if message is not None else await asyncio.get_running_loop().create_future()

    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    await api({"type": "http", "headers": [], "method": "POST", "path": "/"}, receive, send)
    return sent


def test_a_body_that_is_not_there_in_time_gives_its_place_up():
    read: list[dict] = []

    async def endpoint(scope, receive, send) -> None:
        while True:
            read.append(await receive())
            if not read[-1].get("more_body"):
                break
        # whether the client goes: that may take longer
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.2)

    limited = BodyLimit(endpoint, 100, report=lambda error: error, max_s=0.05)
    part, last = ({"type": "http.request", "body": b"abc", "more_body": more} for more in (True, False))
    asyncio.run(slow_body(limited, part, last))
    assert read == [part, last]
    with pytest.raises(ApiError, match="within 0.05 s, got 6 bytes of it") as slow:
        asyncio.run(slow_body(limited, part, part))
    assert slow.value.status == 408 and slow.value.code == "body_too_slow"


def test_overload(make_api, pool):
    api = make_api(max_concurrent_requests=2, retry_after_seconds=2.5)
    pool.step_seconds = 0.01

    async def go() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://x") as client:
            first = await asyncio.gather(*(client.post(COMPLETIONS, json=GOOD) for _ in range(5)))
            return [*first, await client.post(COMPLETIONS, json=GOOD)]

    responses = asyncio.run(go())
    assert sorted(r.status_code for r in responses[:5]) == [200, 200, 429, 429, 429]
    assert responses[5].status_code == 200
    refused = next(r for r in responses if r.status_code == 429)
    assert refused.headers["retry-after"] == "3"
    assert refused.headers["x-hybridserve-reject-reason"] == "concurrent_requests"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert "2" in error["message"]


def test_failed_requests_give_their_place_back(make_caller, pool):
    caller = make_caller(max_concurrent_requests=1)
    for _ in range(3):
        assert caller.post(COMPLETIONS, {"prompt": ""}).status_code == 400
    pool.failures = {0: RuntimeError("broken"), 1: RuntimeError("broken")}
    for _ in range(3):
        assert caller.post(COMPLETIONS, {**GOOD, "stream": True}).status_code == 500
    pool.failures = {}
    assert caller.post(COMPLETIONS, GOOD).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate"])
def test_priority_and_what_was_asked_for_reach_the_pool(caller, pool, path):
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "def f"}
    content = json.dumps({**body, "max_tokens": 7}).encode()
    headers = {"x-hybridserve-priority": " Low "}
    assert caller.request("POST", path, content=content, headers=headers).is_success
    assert caller.post(path, body).is_success
    asked = [(one.priority, one.stated_max_tokens) for one in pool.submitted]
    assert asked == [("low", 7), ("normal", None)]
    refused = caller.request("POST", path, content=content, headers={"x-hybridserve-priority": "9"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-hybridserve-priority"
    assert "'9'" in refused.json()["error"]["message"]


def test_every_answer_has_a_request_id(caller):
    ids = {caller.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/v1/models")}
    assert len(ids) == 3
    given = caller.request("GET", "/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    forged = caller.request("GET", "/health", headers={"x-request-id": "a b\tc" * 100})
    assert "a b" not in forged.headers["x-request-id"]


def test_a_server_that_names_requests_itself_is_not_doubled(make_caller):
    response = make_caller(name_requests=False).request("GET", "/health", headers={"x-request-id": "mine"})
    assert "x-request-id" not in response.headers


def test_headers_that_steer_serve_are_dropped():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    headers = [
        (b"X-Request-Timeout-Seconds", b"1"),
        (b"x-request-disconnect-disabled", b"1"),
        (b"serve_multiplexed_model_id", b"other"),
        (b"accept", b"*/*"),
    ]
    asyncio.run(DropHeaders(app)({"type": "http", "headers": headers}, None, None))
    assert seen["headers"] == [(b"accept", b"*/*")]


@pytest.mark.parametrize(
    "name", [b"x-request-id", b"X-Session-Id", b"x_session_id", b"traceparent", b"tracestate"]
)
def test_headers_that_serve_cannot_decode_are_dropped(name: bytes):
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope)

    # a value of another header may be any bytes
    kept = [(name, b"caf\xc3\xa9"), (b"x-name", b"caf\xe9")]
    asyncio.run(DropHeaders(app)({"type": "http", "headers": [*kept, (name, b"caf\xe9")]}, None, None))
    assert seen["headers"] == kept


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_name": ""}, "model_name"),
        ({"max_body_bytes": 0}, "max_body_bytes .* 0"),
        ({"max_concurrent_requests": True}, "max_concurrent_requests .* True"),
        ({"max_choices": -1}, "max_choices .* -1"),
        ({"retry_after_seconds": float("nan")}, "retry_after_seconds .* nan"),
    ],
)
def test_options_are_checked(options, named):
    with pytest.raises(ValueError, match=named):
        IngressOptions(**{"model_name": "demo", **options})
