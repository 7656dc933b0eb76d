"""A server that is told to stop: what is new is refused, what is there may end or is told that it may not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from hybridserve.cluster.ingress.in_flight import InFlight

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
GOOD = {"prompt": "def f", "max_tokens": 8}
WAIT_S = 20


@asynccontextmanager
async def client_of(api) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=WAIT_S) as client:
        yield client


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_stop_without_requests_returns_at_once_and_refuses_what_comes(make_api) -> None:
    api = make_api()
    assert await api.state.service.in_flight.stop(WAIT_S) == 0
    async with client_of(api) as client:
        for path in (PATH, "/v1/chat/completions", "/generate"):
            refused = await client.post(path, json=GOOD)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_stopping"
            assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is stopping")


async def test_answers_in_progress_end_well_within_the_limit(make_api, pool, parse_events) -> None:
    api = make_api()
    pool.step_seconds = 0.02
    in_flight = api.state.service.in_flight
    async with client_of(api) as client:
        whole = asyncio.create_task(client.post(PATH, json=GOOD))
        stream = asyncio.create_task(client.post(PATH, json={**GOOD, "stream": True}))
        await until(lambda: len(in_flight) == 2)
        assert await in_flight.stop(WAIT_S) == 0
        assert (await whole).json()["choices"][0]["finish_reason"] == "length"
        assert parse_events((await stream).text)[-1] == "[DONE]"


async def test_what_still_runs_at_the_limit_is_told_and_freed(make_api, pool, parse_events) -> None:
    api = make_api()
    pool.stuck_at = 3
    in_flight = api.state.service.in_flight
    async with client_of(api) as client:
        streams = [asyncio.create_task(client.post(PATH, json={**GOOD, "stream": True})) for _ in range(2)]
        many = asyncio.create_task(client.post(PATH, json={**GOOD, "n": 3}))
        await until(lambda: len(in_flight) == 3 and pool.sent == 3 * 5)
        assert await in_flight.stop(0.05) == 3
        for stream in streams:
            *chunks, error, done = parse_events((await stream).text)
            assert (error["error"]["code"], done) == ("server_stopping", "[DONE]")
            assert error["error"]["request_id"] == chunks[0]["id"]
        response = await many
        assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
    assert len(pool.ended) == 5 and len(in_flight) == 0
    text = api.state.service.metrics.render([]).decode()
    assert (
        'code="server_stopping"' in text
        and 'hybridserve_ingress_requests_in_flight{ingress="ingress"} 0.0' in text
    )


async def test_a_stream_without_a_token_at_the_limit_gets_a_status(make_api, pool) -> None:
    api = make_api()
    pool.stuck_at = 0
    in_flight = api.state.service.in_flight
    async with client_of(api) as client:
        stream = asyncio.create_task(client.post(PATH, json={**GOOD, "stream": True}))
        await until(lambda: pool.submitted)
        assert await in_flight.stop(0.0) == 1
        response = await stream
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")


async def test_a_request_that_somebody_else_cancels_is_not_told_anything() -> None:
    in_flight = InFlight()
    sent = []

    async def app(scope, receive, send) -> None:
        await asyncio.Event().wait()

    async def send(message) -> None:
        sent.append(message)

    task = asyncio.create_task(in_flight.serve(app, {"type": "http"}, None, send, lambda error: error))
    await until(lambda: len(in_flight) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (sent, len(in_flight)) == ([], 0)
