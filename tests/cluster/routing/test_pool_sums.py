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
def test_sums_of_shares(seed: int) -> None:
    rng = random.Random(seed)
    sums, shares = PoolSums(), {}
    for _ in range(300):
        name = rng.choice(NAMES)
        share = None
        if rng.random() < 0.9:
            rate = rng.choice([None, 50.0, 75.5])
            share = ReplicaShare(
                rng.randrange(100), rng.choice([0, 7, 40]), rate, rng.choice([None, 0.0, 9.0, 30.0])
            )
        shares.pop(name, None)
        if share is not None:
            shares[name] = share
        sums.set(name, share)
        held = list(shares.values())
        assert sums.outstanding == sum(one.outstanding for one in held)
        assert sums.queued == sum(one.queued for one in held)
        rates = [one.tokens_per_s for one in held if one.tokens_per_s is not None]
        assert sums.tokens_per_s == (pytest.approx(sum(rates)) if rates else None)
        assert sums.queue_wait_s == wait_of(held)


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
