"""Requests whose ingress replica ends, as the process before it sees them."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from hybridserve.cluster.ingress.failover import IngressFailover

pytestmark = pytest.mark.anyio

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "headers": []}
PARTS = [b"one ", b"two ", b"three"]
Try = Callable[[Scope, Receive, Send], Awaitable[None]]


async def body_of(receive: Receive) -> bytes:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            return body
    raise ConnectionError


async def ends(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve's proxy, when the replica dies after it has read the request."""
    scope["root_path"] += "/prefix"
    await body_of(receive)


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    body = await body_of(receive)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["root_path"].encode() + body})


def breaks(content_type: bytes, *parts: bytes) -> Try:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})

    return app


async def run(tries: list[Try], *, leaves: bool = False, **limits: int) -> tuple[list[Message], int]:
    """(what was sent, how many tries were made)."""
    sent: list[Message] = []
    made = 0
    coming = [{"type": "http.request", "body": part, "more_body": part != PARTS[-1]} for part in PARTS]

    async def receive() -> Message:
        if coming and not (leaves and len(coming) == 1):
            return coming.pop(0)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal made
        made += 1
        await tries[made - 1](scope, receive, send)

    await IngressFailover(app, **limits)(SCOPE, receive, send)
    return sent, made


async def test_a_request_that_got_no_answer_is_sent_again_as_it_came() -> None:
    sent, made = await run([ends, ends, answers])
    assert (made, sent[-1]["body"]) == (3, b"".join(PARTS))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_one_that_ends_every_ingress_is_told_so() -> None:
    sent, made = await run([ends] * 4)
    assert (made, sent[0]["status"]) == (3, 503)
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "ingress_failed"


async def test_a_body_too_large_to_keep_is_not_sent_again() -> None:
    size = len(b"".join(PARTS))
    sent, made = await run([ends, answers], kept_bytes=size - 1)
    assert (made, sent[0]["status"]) == (1, 503)
    assert (await run([ends, answers], kept_bytes=size))[1] == 2


async def test_nothing_is_done_for_a_client_that_left() -> None:
    async def gone(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(ConnectionError):
            await body_of(receive)

    assert await run([gone, answers], leaves=True) == ([], 1)


async def test_a_request_that_ends_before_it_is_read_is_read_once() -> None:
    async def ends_at_once(scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.ensure_future(body_of(receive))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})

    sent, made = await run([ends_at_once, answers])
    assert (made, sent[-1]["body"]) == (2, b"".join(PARTS))


@pytest.mark.parametrize(
    ("first", "request_id"),
    [(b'data: {"id":"cmpl-7","choices":[]}\n\n', "cmpl-7"), (b'data: {"text":"a"}\n\n', None)],
)
async def test_a_stream_that_breaks_ends_with_an_error_event(first: bytes, request_id: str | None) -> None:
    sent, made = await run([breaks(b"text/event-stream; charset=utf-8", first, b"data: {}\n\n"), answers])
    assert made == 1
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, False]
    error, done, rest = sent[-1]["body"].split(b"\n\n")
    told = json.loads(error.removeprefix(b"data: "))["error"]
    assert (told["code"], told.get("request_id")) == ("ingress_failed", request_id)
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_another_answer_that_breaks_stays_broken() -> None:
    sent, made = await run([breaks(b"application/json", b'{"a'), answers])
    # an HTTP server cuts the connection of an answer that has no end
    assert made == 1 and sent[-1]["more_body"]
