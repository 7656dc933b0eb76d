"""A whole ingress in this process, over real sockets and two engines: clients that read slowly or leave."""

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import uvicorn

from hybridserve.cluster.ingress import sse
from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.pool.retry import RetryPolicy
from hybridserve.replicas.text.tokenizer import Tokenizer

from ..two_replicas import Pool, two_replicas
from .client import Exchange, completion
from .counting_engine import CountingFactory, answer

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


class Server(uvicorn.Server):
    """On the test's own event loop, its signals left alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def ingress(pool: Pool, model: Path) -> AsyncIterator[int]:
    """Its port."""
    api = build_api(pool.router, Tokenizer.load(model), IngressOptions(model_name="demo"), {})
    listening = socket.create_server(("127.0.0.1", 0))
    # what the system keeps for a client that does not read, so that little is enough to fill it
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = Server(uvicorn.Config(api, log_level="warning"))
    task = asyncio.create_task(server.serve([listening]))
    await pool.until(lambda: server.started)
    try:
        yield listening.getsockname()[1]
    finally:
        # a test that fails may leave a client connected
        server.should_exit = server.force_exit = True
        await task


async def running(pool: Pool) -> int:
    loads = [await actor.load() for actor in pool.replicas.up.values()]
    return sum(load.running + load.waiting for load in loads if load is not None)


async def until_nothing_runs(pool: Pool, limit_s: float = 10.0) -> float:
    began = time.monotonic()
    while await running(pool) or not pool.idle():
        assert time.monotonic() < began + limit_s, f"{await running(pool)} still run"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def slow_client(port: int, body: dict[str, object]) -> socket.socket:
    """Its request is sent; nothing is read yet."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, Exchange("127.0.0.1", port, PATH, body)._request)
    return client


async def read_slowly(client: socket.socket) -> None:
    """One byte every 20 ms, for ever."""
    while await asyncio.get_running_loop().sock_recv(client, 1):
        await asyncio.sleep(0.02)


async def test_a_slow_reader_is_given_up_and_holds_nobody_up(demo_model: Path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    factory = CountingFactory(step_s=0.0005)
    async with (
        two_replicas(factory, RetryPolicy(10.0), max_unread_tokens=500) as pool,
        ingress(pool, demo_model) as port,
    ):
        clients = [await slow_client(port, completion([5], 19_000)) for _ in range(2)]
        readers = [asyncio.create_task(read_slowly(client)) for client in clients]
        quick = await asyncio.gather(
            *(Exchange("127.0.0.1", port, PATH, completion([i], 300)).run() for i in range(4))
        )
        assert all(reply.complete for reply in quick)
        async with asyncio.timeout(60):
            while pool.listener.counts["overflow"] < 2:
                await asyncio.sleep(0.05)
        # the engines are free, though the clients are still there and still read
        async with asyncio.timeout(10):
            while await running(pool):
                await asyncio.sleep(0.02)
        assert not any(reader.done() for reader in readers)
        assert sum("reads too slowly" in record.getMessage() for record in caplog.records) == 2
        # one that wakes up is told
        readers[0].cancel()
        rest = b""
        async with asyncio.timeout(30):
            while chunk := await asyncio.get_running_loop().sock_recv(clients[0], 65536):
                rest += chunk
        assert b'"code":"client_too_slow"' in rest and b"data: [DONE]\n\n" in rest
        assert rest.endswith(b"0\r\n\r\n")
        assert pool.routed.retries.total() == 0
        readers[1].cancel()
        for client in clients:
            client.close()
        await until_nothing_runs(pool)


async def test_a_client_that_takes_nothing_at_all_loses_its_place(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse.EventStream.__init__, "__defaults__", (0.4,))
    async with (
        two_replicas(CountingFactory(step_s=0.0005), RetryPolicy(), max_unread_tokens=500) as pool,
        ingress(pool, demo_model) as port,
    ):
        client = await slow_client(port, completion([5], 19_000))
        await pool.until(lambda: bool(pool.replicas.calls.total()))
        # it is cut off, or its stream overflows first
        await until_nothing_runs(pool, 30.0)
        async with asyncio.timeout(30):
            while b'requests_in_flight{ingress="ingress"} 0.0' not in await metrics(port):
                await asyncio.sleep(0.1)
        client.close()


async def metrics(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = await reader.read()
    writer.close()
    return text


async def leave(port: int, number: int, rng: random.Random) -> None:
    """Begin a request, streamed or not, and leave after a while: before, between or after its tokens."""
    body = completion([number % 50], rng.choice((5, 40, 400)), stream=rng.random() < 0.7)
    exchange = asyncio.create_task(Exchange("127.0.0.1", port, PATH, body).run())
    await asyncio.wait({exchange}, timeout=rng.random() * 0.2)
    exchange.cancel()
    await asyncio.wait({exchange})


async def test_a_thousand_clients_that_leave_at_any_moment_leave_nothing(demo_model: Path, report) -> None:
    rng = random.Random(6)
    async with (
        two_replicas(CountingFactory(step_s=0.002), RetryPolicy()) as pool,
        ingress(pool, demo_model) as port,
    ):
        neighbour = asyncio.create_task(Exchange("127.0.0.1", port, PATH, completion([7], 600)).run())
        await pool.until(lambda: bool(pool.replicas.calls.total()))
        tasks_before = len(asyncio.all_tasks())
        for start in range(0, 1000, 50):
            await asyncio.gather(*(leave(port, start + i, rng) for i in range(50)))
        reply = await neighbour
        assert reply.complete and len(reply.events) > 2
        seconds = await until_nothing_runs(pool)
        report(left=1000, seconds=seconds)
        await pool.until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        assert b'requests_in_flight{ingress="ingress"} 0.0' in await metrics(port)
        text = Tokenizer.load(demo_model).decode(answer([7], 600))
        assert reply.text == text


async def test_a_killed_replica_breaks_no_stream(demo_model: Path, report) -> None:
    decode = Tokenizer.load(demo_model).decode
    async with (
        two_replicas(CountingFactory(step_s=0.005), RetryPolicy(10.0)) as pool,
        ingress(pool, demo_model) as port,
    ):
        bodies = [completion([i], 200, stream=i % 4 > 0) for i in range(24)]
        exchanges = [Exchange("127.0.0.1", port, PATH, body) for body in bodies]
        tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
        await pool.until(lambda: sum(len(e.reply.events) > 5 for e in exchanges) == 18)
        pool.replicas.kill("a")
        pool.replicas.remove("a")
        replies = await asyncio.gather(*tasks)
        assert [reply.text for reply in replies] == [decode(answer([i], 200)) for i in range(24)]
        assert all(reply.complete for reply in replies)
        usage = [json.loads(reply.body)["usage"] for reply in replies if not reply.events]
        assert {one["completion_tokens"] for one in usage} == {200}
        report(
            failed=0,
            resumed=pool.routed.retries["resumed"],
            longest_silence_s=max(reply.longest_silence_s for reply in replies),
        )
        assert 0 < pool.routed.retries["resumed"] == pool.routed.retries.total() < 24


async def test_where_answers_are_not_resumed_a_stream_ends_with_an_error_event(demo_model: Path) -> None:
    async with (
        two_replicas(CountingFactory(step_s=0.005), RetryPolicy(10.0, resume=False)) as pool,
        ingress(pool, demo_model) as port,
    ):
        bodies = [completion([i], 200, stream=i % 2 > 0) for i in range(8)]
        exchanges = [Exchange("127.0.0.1", port, PATH, body) for body in bodies]
        tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
        await pool.until(lambda: sum(len(e.reply.events) > 5 for e in exchanges) == 4)
        killed = time.monotonic()
        for name in ("a", "b"):
            pool.replicas.kill(name)
            pool.replicas.remove(name)
        replies = await asyncio.gather(*tasks)
        assert max(reply.ended for reply in replies) - killed < 1.0
        for reply in replies:
            assert reply.error is not None and reply.error["code"] == "replica_failed"
            assert str(reply.error["request_id"]).startswith("cmpl-") and not reply.broken
            if reply.events:
                assert reply.status == 200 and reply.events[-1] == "[DONE]"
                assert reply.events[0]["id"] == reply.error["request_id"]
            else:
                assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        await until_nothing_runs(pool)
