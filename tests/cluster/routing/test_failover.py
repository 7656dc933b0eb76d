"""Requests over two engines of one pool, of which one fails: the router, the client and the bus together."""

import asyncio

import pytest

from hybridserve.cluster.pool.interface import ReplicaFailed
from hybridserve.cluster.pool.retry import RetryPolicy
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.pool_spec import PoolLimits

from ..two_replicas import SPEC, two_replicas

pytestmark = pytest.mark.anyio


async def test_streams_of_a_killed_replica_go_on_at_the_other(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy(10.0)) as pool:
        tasks = [asyncio.create_task(pool.answer(f"r{i}", 100 * i)) for i in range(8)]
        await pool.until(lambda: len(pool.seen) == 8 and all(len(t) > 3 for t in pool.seen.values()))
        pool.replicas.kill("a")
        pool.replicas.remove("a")
        answers = await asyncio.gather(*tasks)
        assert answers == [list(range(100 * i, 100 * i + 60)) for i in range(8)]
        resumed = pool.routed.retries["resumed"]
        assert pool.routed.retries == {"resumed": resumed} and 0 < resumed < 8
        assert pool.replicas.calls["a"] + pool.replicas.calls["b"] == 8 + resumed
        assert pool.idle()


async def test_without_resume_they_fail_and_others_do_not_notice(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy(10.0, resume=False)) as pool:
        tasks = [asyncio.create_task(pool.answer(f"r{i}", 100 * i)) for i in range(8)]
        await pool.until(lambda: len(pool.seen) == 8 and all(len(t) > 3 for t in pool.seen.values()))
        pool.replicas.kill("a")
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, ReplicaFailed)]
        assert 0 < len(failed) == pool.routed.retries["failed"] < 8
        whole = [answer for answer in answers if isinstance(answer, list)]
        assert len(whole) == 8 - len(failed) and all(len(answer) == 60 for answer in whole)
        assert pool.idle()


async def test_a_dead_engine_that_still_answers_costs_no_request_anything(fake_factory) -> None:
    """Between an engine's death and Serve's taking its replica out, the replica looks idle."""
    async with two_replicas(fake_factory(), RetryPolicy(10.0, resume=False)) as pool:
        pool.replicas.dead.add("a")
        answers = await asyncio.gather(*(pool.answer(f"r{i}", i) for i in range(16)))
        assert answers == [list(range(i, i + 60)) for i in range(16)]
        # after the first failures nobody is sent there
        before = pool.replicas.calls["a"]
        assert 0 < before == pool.routed.retries["restarted"]
        await asyncio.gather(*(pool.answer(f"s{i}", i) for i in range(16)))
        assert pool.replicas.calls["a"] == before
        assert pool.idle()


async def test_with_no_other_replica_a_request_waits_for_one(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy(10.0)) as pool:
        begun = asyncio.create_task(pool.answer("begun", 100))
        await pool.until(lambda: len(pool.seen.get("begun", ())) > 3)
        waiting = pool.replicas.up["b"] if pool.replicas.calls["a"] else pool.replicas.up["a"]
        for name in list(pool.replicas.up):
            pool.replicas.kill(name)
            pool.replicas.remove(name)
        late = asyncio.create_task(pool.answer("late", 300, count=5))
        await asyncio.sleep(0.1)
        assert not begun.done() and not late.done()
        pool.replicas.add("c", waiting)
        assert await begun == list(range(100, 160))
        assert await late == list(range(300, 305))
        assert pool.routed.retries == {"resumed": 1}


async def test_but_not_for_ever(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy(0.2)) as pool:
        begun = asyncio.create_task(pool.answer("begun", 100))
        await pool.until(lambda: len(pool.seen.get("begun", ())) > 3)
        for name in list(pool.replicas.up):
            pool.replicas.kill(name)
            pool.replicas.remove(name)
        with pytest.raises(ReplicaFailed, match="no other replica was there in time"):
            await begun
        assert pool.routed.retries == {"failed": 1}
        assert pool.idle()


async def test_a_request_that_kills_its_engine_kills_two_and_is_told(fake_factory) -> None:
    async with two_replicas(fake_factory(), RetryPolicy(10.0)) as pool:
        with pytest.raises(ReplicaFailed, match="told to die"):
            await pool.answer("poison", 666)
        assert sum(pool.replicas.calls.values()) == 2
        assert pool.routed.retries == {"failed": 1}


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy(10.0)) as pool:
        begun = asyncio.create_task(pool.answer("begun", 100))
        await pool.until(lambda: len(pool.seen.get("begun", ())) > 3)
        for name in list(pool.replicas.up):
            pool.replicas.kill(name)
            pool.replicas.remove(name)
        await asyncio.sleep(0.05)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        await pool.until(pool.idle)


async def test_full_only_when_every_pool_is(fake_factory) -> None:
    async with two_replicas(fake_factory(step_s=0.005), RetryPolicy()) as pool:
        assert pool.router.full("normal") is None
        admission = Admission("p", PoolLimits(1, 10_000, 30.0, 1.0, 1.0), 1)
        small = RoutedPool(SPEC, pool.routed.client, pool.routed.loads, admission)
        task = asyncio.create_task(pool.answer("r", 1))
        await pool.until(lambda: bool(pool.seen.get("r")))
        refusal = LengthRouter([small]).full("high")
        assert refusal is not None and refusal.reason == "concurrent_requests" and refusal.retry_after_s >= 1
        assert LengthRouter([small, pool.routed]).full("high") is None
        await task
