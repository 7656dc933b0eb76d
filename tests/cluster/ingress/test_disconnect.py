"""A client that goes away ends its requests in the pool at once, over a real socket."""

import json
import socket
import time

import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "def f", "max_tokens": 64},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"prompt": "def f", "max_tokens": 64},
}


def send(port: int, path: str, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    client.sendall(head + data)
    return client


def wait_for(condition, seconds: float = 5.0) -> float:
    """Poll until `condition()`; the time of day (monotonic) it came true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)
    return time.monotonic()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stuck_at", [0, 3, None])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
def test_the_pool_sees_the_client_go(serve, pool, path, stream, stuck_at, n):
    if path == "/generate" and n > 1:
        n = 1
    pool.text = "word " * 40
    pool.stuck_at = stuck_at
    pool.step_seconds = 0.02
    several = {} if path == "/generate" else {"n": n}
    client = send(serve(), path, {**BODIES[path], **several, "stream": stream})
    wait_for(lambda: pool.sent >= 2 * n if stuck_at != 0 else len(pool.submitted) == n)
    if stream and stuck_at != 0:
        assert b"200 OK" in client.recv(4096)
    assert pool.ended == {}
    left = time.monotonic()
    client.close()
    wait_for(lambda: len(pool.ended) == n)
    # some 10 ms on a machine at rest
    assert max(pool.ended.values()) - left < 1.0


def test_a_place_is_free_again_after_a_disconnect(serve, pool):
    port = serve(max_concurrent_requests=1)
    pool.stuck_at = 1
    client = send(port, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True})
    wait_for(lambda: pool.sent == 1)
    with send(port, COMPLETIONS, BODIES[COMPLETIONS]) as second:
        assert b"429" in second.recv(4096)
    client.close()
    wait_for(lambda: pool.ended)
    pool.stuck_at = None

    def answered() -> bool:
        with send(port, COMPLETIONS, BODIES[COMPLETIONS]) as third:
            return b"200 OK" in third.recv(4096)

    # the pool's request ends a moment before the response does
    wait_for(answered, seconds=1.0)
