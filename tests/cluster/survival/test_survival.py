"""A real application, two replicas and two ingresses: what is lost when a part of it dies, or too many come.

Each test leaves the application whole. The numbers are reported; their bounds are for a slow machine.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hybridserve.replicas.text.tokenizer import Tokenizer

from .application import Application, deploy, processes, seconds_until
from .client import Exchange, Reply, completion
from .counting_engine import CountingFactory, answer

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
CONCURRENT = 64
# tokens of an answer that takes more than a minute
LONG = 8_000


@pytest.fixture(scope="module")
def application(ray_instance: int, demo_model: Path) -> Iterator[Application]:
    from ray import serve

    deploy(
        CountingFactory(step_s=0.01),
        demo_model,
        "survival",
        serving={"device": "cpu", "max_concurrent_requests": CONCURRENT, "retry_wait_s": 60},
        pools=[{"name": "only", "replicas": 2}],
        ingress={"num_replicas": 2},
    )
    yield Application("survival", ray_instance)
    serve.delete("survival")


@pytest.fixture(autouse=True)
async def left_whole(application: Application) -> AsyncIterator[None]:
    await seconds_until(application.whole, "the application is whole before the test")
    yield
    await seconds_until(application.whole, "the application is whole again")


@pytest.fixture(scope="module")
def texts(demo_model: Path) -> Callable[[int, int], str]:
    """texts(prompt token, count): the answer."""
    decode = Tokenizer.load(demo_model).decode
    return lambda prompt, count: decode(answer([prompt], count))


def ask(application: Application, number: int, count: int, stream: bool = True) -> Exchange:
    return Exchange("127.0.0.1", application.port, PATH, completion([number], count, stream))


@asynccontextmanager
async def under_load(application: Application, workers: int, count: int) -> AsyncIterator[list[Exchange]]:
    """Short requests, one after another from each worker, until the block ends; all that were begun."""
    begun: list[Exchange] = []
    over = asyncio.Event()

    async def work(number: int) -> None:
        while not over.is_set():
            begun.append(ask(application, number, count, stream=len(begun) % 2 > 0))
            await begun[-1].run()

    tasks = [asyncio.create_task(work(number)) for number in range(workers)]
    try:
        yield begun
    finally:
        over.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)


@asynccontextmanager
async def all_places_taken(application: Application) -> AsyncIterator[list[Reply]]:
    """Until the block ends, each ingress has as many answers under way as it takes; these, unfinished."""
    tries: list[Exchange] = []
    tasks: list[asyncio.Task[Reply]] = []

    def held() -> list[Reply]:
        return [one.reply for one in tries if one.reply.events and not one.reply.ended]

    def decided() -> bool:
        return all(one.reply.events or one.reply.ended for one in tries)

    try:
        # some are refused, as the proxy does not know which ingress has room
        while missing := CONCURRENT - len(held()):
            more = [ask(application, 1, LONG) for _ in range(missing)]
            tries += more
            tasks += [asyncio.create_task(one.run()) for one in more]
            await seconds_until(decided, "all are admitted or refused")
            assert len(tries) < 20 * CONCURRENT
        yield held()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def failed(replies: list[Reply]) -> list[str]:
    return [f"{one.status} {one.broken or one.error or one.body[:80]}" for one in replies if not one.complete]


async def test_a_replica_killed_mid_stream_fails_no_request(application, texts, report) -> None:
    exchanges = [ask(application, i, 150, stream=i % 4 > 0) for i in range(24)]
    tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
    streams = [exchange for i, exchange in enumerate(exchanges) if i % 4]
    await seconds_until(lambda: all(len(one.reply.events) > 5 for one in streams), "all streams run")
    killed_at = application.replicas()[0].kill()
    late = [asyncio.create_task(ask(application, i, 5).run()) for i in range(8)]
    recovering = asyncio.create_task(seconds_until(application.whole, "whole again"))
    replies = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    lates = await asyncio.wait_for(asyncio.gather(*late), 60)
    silences = [one.longest_silence_s for one in replies if one.events]
    report(
        failed=len(failed([*replies, *lates])),
        longest_silence_s=max(silences),
        answered_after_s=max(one.ended for one in lates) - killed_at,
        whole_after_s=await recovering,
    )
    assert failed([*replies, *lates]) == []
    assert [one.text for one in replies] == [texts(i, 150) for i in range(24)]
    assert [one.text for one in lates] == [texts(i, 5) for i in range(8)]
    # those of the other replica were not held up
    assert sorted(silences)[0] < 1.0


async def test_a_killed_ingress_fails_nothing_but_streams_that_had_begun(application, texts, report) -> None:
    async with under_load(application, 6, 20) as begun:
        await seconds_until(lambda: sum(one.reply.complete for one in begun) > 20, "a load")
        held = [ask(application, i, 150, stream=i % 2 > 0) for i in range(12)]
        tasks = [asyncio.create_task(exchange.run()) for exchange in held]
        await seconds_until(lambda: all(one.reply.events for one in held[1::2]), "streams run")
        first = len(begun)
        killed_at = application.ingresses()[0].kill()
        recovering = asyncio.create_task(seconds_until(application.whole, "whole again"))
        await seconds_until(lambda: sum(one.reply.complete for one in begun[first:]) > 40, "the load goes on")
        went_on_s = time.monotonic() - killed_at
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    replies = [one.reply for one in begun + held]
    in_flight = [one for one in replies if one.began < killed_at and not one.ended < killed_at]
    later = [one for one in replies if one.began >= killed_at]
    lost = [one for one in in_flight if not one.complete]
    report(
        failed=len(lost) + len(failed(later)),
        in_flight=len(in_flight),
        later=len(later),
        of_later=len(failed(later)),
        told_after_s=max((one.ended - killed_at for one in lost), default=0.0),
        went_on_s=went_on_s,
        whole_after_s=await recovering,
    )
    assert failed(later) == []
    for one in lost:
        assert one.events and not one.broken, failed([one])
        assert one.error is not None and one.error["code"] == "ingress_failed"
        assert one.error["request_id"] == one.events[0]["id"] and one.events[-1] == "[DONE]"
    assert [one.reply.text for one in held[::2]] == [texts(i, 150) for i in range(0, 12, 2)]
    # `left_whole` holds that the engines have dropped what nobody waits for any more


async def test_a_burst_is_shared_by_the_ingresses(application, report) -> None:
    """Each takes half of the requests that there is room for, so that one more would be refused."""
    replies = await asyncio.gather(*(ask(application, i, 60).run() for i in range(CONCURRENT)))
    refused = sum(one.status == 429 for one in replies)
    report(refused=refused, of=CONCURRENT)
    # the proxy counts other requests too, and each from its choice to its end, an ingress a little less
    assert refused <= CONCURRENT // 10
    assert len(failed(replies)) == refused


async def test_a_killed_controller_fails_no_request(application, report) -> None:
    async with under_load(application, 6, 20) as begun:
        await seconds_until(lambda: sum(one.reply.complete for one in begun) > 10, "a load")
        [controller] = processes("ray::ServeController")
        controller.kill()
        recovering = asyncio.create_task(
            seconds_until(
                lambda: [one.pid for one in processes("ray::ServeController")] not in ([], [controller.pid]),
                "a new one",
            )
        )
        recovered_s = await recovering
        at = len(begun)
        await seconds_until(lambda: len(begun) > at + 20, "the load goes on")
    replies = [one.reply for one in begun]
    report(failed=len(failed(replies)), of=len(replies), new_controller_s=recovered_s)
    assert failed(replies) == []


async def test_a_flood_is_refused_at_once_and_the_admitted_are_served(application, texts, report) -> None:
    alone = [await ask(application, 1, 5).run() for _ in range(5)]
    # as many as are admitted, together
    full = await asyncio.gather(*(ask(application, i, 40).run() for i in range(CONCURRENT // 2)))
    before = [one.rss_mib for one in application.ingresses()]
    async with all_places_taken(application) as held:
        began = time.monotonic()
        flood = await asyncio.wait_for(
            asyncio.gather(*(ask(application, i, 5).run() for i in range(4 * CONCURRENT))), 120
        )
        took = time.monotonic() - began
    growth = sum(one.rss_mib for one in application.ingresses()) - sum(before)
    await seconds_until(application.idle, "the places are free again")
    later = await asyncio.gather(*(ask(application, i, 40).run() for i in range(CONCURRENT // 2)))

    refused = [one for one in flood if one.status == 429]
    report(
        held=len(held),
        refused=len(refused),
        seconds=took,
        growth_mib=growth,
        first_token_alone_s=statistics.median(one.first_event_s for one in alone),
        first_token_full_s=statistics.median(one.first_event_s for one in full),
        first_token_held_s=statistics.median(one.first_event_s for one in held),
        refused_within_s=max(one.ended - one.began for one in refused),
    )
    assert all(one.error is None and texts(1, LONG).startswith(one.text) for one in held)
    assert len(refused) == len(flood), failed(flood)
    assert failed([*alone, *full, *later]) == []
    assert [one.text for one in later] == [texts(i, 40) for i in range(CONCURRENT // 2)]
    for one in refused:
        assert int(one.headers["retry-after"]) >= 1
        assert one.headers["x-hybridserve-reject-reason"] == "concurrent_requests"
        assert one.error is not None and one.error["code"] == "overloaded"
    assert growth < 64


async def test_slow_readers_and_leavers_hold_nobody_up(application, texts, report) -> None:
    async def read_slowly(number: int) -> None:
        exchange = ask(application, number, 300)
        reader, writer = await asyncio.open_connection("127.0.0.1", application.port, limit=64)
        writer.write(exchange._request)
        while await reader.read(1):
            await asyncio.sleep(0.05)

    slow = [asyncio.create_task(read_slowly(i)) for i in range(8)]
    rng = random.Random(1)

    async def leave(number: int) -> None:
        task = asyncio.create_task(
            ask(application, number, rng.choice((3, 30, 300)), rng.random() < 0.7).run()
        )
        await asyncio.wait({task}, timeout=rng.random() * 0.5)
        task.cancel()

    neighbour = asyncio.create_task(ask(application, 5, 200).run())
    for start in range(0, 120, 24):
        await asyncio.gather(*(leave(start + i) for i in range(24)))
    reply = await neighbour
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)
    report(failed=len(failed([reply])), idle_after_s=await seconds_until(application.idle, "nothing runs"))
    assert reply.text == texts(5, 200)


async def test_a_soak_of_short_requests_keeps_memory_flat(application, texts, report) -> None:
    async def some(count: int) -> list[Reply]:
        replies: list[Reply] = []

        async def work(number: int) -> None:
            while len(replies) < count:
                replies.append(await ask(application, number, 4, stream=number % 2 > 0).run())

        await asyncio.gather(*(work(i) for i in range(8)))
        return replies

    warm = await some(50)
    parts = [*application.ingresses(), *application.replicas(), *application.engines()]
    before = {one.pid: one.rss_mib for one in parts}
    replies = await some(450)
    growth = {one.title.split()[0]: one.rss_mib - before[one.pid] for one in parts}
    report(failed=len(failed([*warm, *replies])), of=len(replies), **growth)
    assert failed([*warm, *replies]) == []
    assert max(growth.values()) < 24
