"""Sums that are kept up to date are those of adding all replicas up anew."""

import random

import pytest

from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_sums import PoolSums, ReplicaShare

NAMES = [f"r{index}" for index in range(6)]


def wait_of(shares: list[ReplicaShare]) -> float | None:
    """The least wait; none when any queue's pace is not known."""
    if not shares or any(share.queued and not share.starts_per_s for share in shares):
        return None
    return min(share.queued / share.starts_per_s if share.queued else 0.0 for share in shares)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("queues", [[0, 7, 40], [7, 40, 41]], ids=["some idle", "none idle"])
def test_sums_of_shares(seed: int, queues: list[int]) -> None:
    rng = random.Random(seed)
    sums, shares, waits = PoolSums(), {}, set()
    paces = [None, 0.0, 9.0, 30.0] if 0 in queues else [9.0, 30.0, 31.0]
    for _ in range(300):
        name = rng.choice(NAMES)
        share = None
        if rng.random() < 0.9:
            rate = rng.choice([None, 50.0, 75.5])
            share = ReplicaShare(rng.randrange(100), rng.choice(queues), rate, rng.choice(paces))
        shares.pop(name, None)
        if share is not None:
            shares[name] = share
        sums.set(name, share)
        held = list(shares.values())
        assert sums.outstanding == sum(one.outstanding for one in held)
        assert sums.queued == sum(one.queued for one in held)
        rates = [one.tokens_per_s for one in held if one.tokens_per_s is not None]
        assert sums.tokens_per_s == (pytest.approx(sum(rates)) if rates else None)
        if rng.random() < 0.5:
            assert sums.queue_wait_s == wait_of(held)
            waits.add(sums.queue_wait_s)
    assert len(waits) > 2 or 0 in queues


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("told", [False, True], ids=["by reports", "by Serve"])
def test_a_pools_totals(seed: int, told: bool) -> None:
    """Whatever happens, and in whatever order: bookings, reports, replicas that come and go."""
    rng = random.Random(seed)
    now = 0.0
    loads = PoolLoads(random.Random(seed), lambda: now)
    replicas, live, count = list(NAMES), {}, 0
    if told:
        loads.set_replicas(replicas)
    for _ in range(400):
        now += rng.random()
        action = rng.randrange(8)
        if action <= 1:
            count += 1
            name, cost = str(count), Cost(rng.randrange(1, 300), rng.randrange(1, 50))
            loads.book(name, cost, rng.choice([None, 1, 2]))
            live[name] = cost.tokens
            loads.choose(replicas, name)
        elif action == 2:
            report = ReplicaLoad(
                *[0] * 11,
                outstanding_tokens=rng.randrange(1000),
                queued_tokens=rng.choice([0, 50]),
                progressed_tokens=int(100 * now),
                started_tokens=int(60 * now),
            )
            loads.observe(rng.choice(NAMES), report)
        elif action == 3 and live:
            loads.routed(rng.choice(list(live)), rng.choice(NAMES))
        elif action == 4 and live:
            loads.accepted(rng.choice(list(live)))
        elif action == 5 and live:
            loads.progress(rng.choice(list(live)), rng.randrange(1, 5))
        elif action == 6 and live:
            name = rng.choice(list(live))
            loads.end(name)
            del live[name]
        elif told:
            replicas = rng.sample(NAMES, rng.randrange(1, 7))
            loads.set_replicas(replicas)
        else:
            loads.forget(rng.choice(NAMES))
        totals = loads.totals()
        assert totals.replicas == len(loads.replicas()) and totals.own_requests == len(live)
        assert totals.outstanding == sum(map(loads.outstanding, loads.replicas()))
        queued = [
            report.queued_tokens for name, report in loads.reports().items() if name in loads.replicas()
        ]
        assert totals.queued >= sum(queued)
    for name in live:
        loads.end(name)
    assert loads.totals().own_outstanding == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_pick_is_the_first_of_a_choice(seed: int) -> None:
    """Of as many replicas as a choice looks at, where both draw the same."""
    names = NAMES[:4]
    one, other = PoolLoads(random.Random(seed)), PoolLoads(random.Random(seed))
    for loads in (one, other):
        loads.set_replicas(names)
    rng = random.Random(seed)
    for index in range(200):
        request, cost, prefix = str(index), Cost(rng.randrange(300), 10), rng.choice([None, 1, 2])
        for loads in (one, other):
            loads.book(request, cost, prefix)
        assert one.pick(request) == other.choose(names, request)[0] == one.replica_of(request)
        fails, ends = rng.random() < 0.1, str(rng.randrange(index + 1))
        for loads in (one, other):
            if fails:
                loads.failed(request)
            loads.end(ends)
    assert one.totals() == other.totals() and one.prefix_hits == other.prefix_hits > 0


def test_a_pick_among_many() -> None:
    loads = PoolLoads(random.Random(1))
    loads.book("early", Cost(1, 1))
    assert loads.pick("early") is None
    many = [f"r{index}" for index in range(100)]
    loads.set_replicas(many)
    for name in many:
        loads.book(name, Cost(100, 100))
        assert loads.pick(name) == loads.replica_of(name)
    loaded = [name for name in many if loads.outstanding(name)]
    # the least of four is one without a request, until there are few of those
    assert len(loaded) > 70 and loads.totals().own_requests == 101
    for name in many:
        if name != "r7":
            loads.routed(name, name)
            loads.failed(name)
    loads.book("late", Cost(1, 1))
    assert loads.pick("late") == "r7"


def test_a_choice_ranks_every_candidate_once() -> None:
    loads = PoolLoads(random.Random(1))
    loads.set_replicas(NAMES)
    for name in NAMES[:-1]:
        loads.book(name, Cost(100, 100))
        loads.routed(name, name)
    first = [loads.choose(NAMES, None) for _ in range(200)]
    assert all(sorted(ranked) == NAMES for ranked in first)
    # the idle one is among four of six two times of three
    assert 100 < sum(ranked[0] == NAMES[-1] for ranked in first) < 170
    assert len({ranked[5] for ranked in first}) > 3
    assert loads.choose([], None) == [] and loads.choose(["r3"], None) == ["r3"]
