"""The autoscaling rule over made-up signals and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.scaling.gpu_ledger import GpuLedger
from hybridserve.cluster.scaling.policy import (
    PoolSignals,
    ScalingMemory,
    ScalingRule,
    decide,
    wanted_replicas,
)

RULE = ScalingRule(1, 8, 1000, 5.0, 0.9, up_after_s=5.0, down_after_s=60.0)


def signals(replicas: int, tokens: float = 0.0, age: float = 0.0, arena: float = 0.0) -> PoolSignals:
    return PoolSignals(replicas, replicas, tokens, age, arena)


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (signals(1, tokens=900), 1),
        (signals(1, tokens=1001), 2),
        (signals(2, tokens=5500), 6),
        (signals(2, tokens=10**6), 8),
        # 3 x 800 hold 2,100 tokens with room to spare, 3 x 800 do not hold 2,500
        (signals(4, tokens=2100), 3),
        (signals(4, tokens=3100), 4),
        (signals(2, tokens=100, age=6.0), 3),
        (signals(4, tokens=100, age=30.0), 8),
        (signals(4, tokens=100, age=4.9), 1),
        (signals(4, tokens=100, arena=0.95), 5),
        (signals(4, tokens=100, arena=0.5), 3),
        # those that start will take their part
        (PoolSignals(3, 1, 900, 60.0, 0.1), 2),
        (signals(3), 1),
    ],
)
def test_what_is_wanted(now: PoolSignals, wanted: int) -> None:
    assert wanted_replicas(RULE, now) == wanted


def test_to_nothing_and_back() -> None:
    rule = ScalingRule(0, 4, 1000, 5.0, 0.9, up_after_s=5.0, down_after_s=60.0)
    assert wanted_replicas(rule, signals(1)) == 0
    assert wanted_replicas(rule, signals(1, tokens=1)) == 1
    assert wanted_replicas(rule, signals(0)) == 0
    asked = PoolSignals(0, 0, 0, 0, 0, unrouted_requests=1)
    # a client waits already
    assert decide(rule, asked, ScalingMemory(), now=0.0) == (1, ScalingMemory())


def test_growing_takes_a_while_and_a_lull_starts_it_anew() -> None:
    memory = ScalingMemory()
    for now, tokens, wanted in ((0, 3000, 1), (4, 3000, 1), (4.5, 500, 1), (6, 3000, 1), (11, 3000, 3)):
        replicas, memory = decide(RULE, signals(1, tokens=tokens), memory, float(now))
        assert replicas == wanted, now


def test_shrinking_goes_no_lower_than_the_most_that_was_wanted_meanwhile() -> None:
    memory = ScalingMemory()
    for now, tokens, wanted in ((0, 500, 6), (30, 2100, 6), (59, 0, 6), (60, 0, 3)):
        replicas, memory = decide(RULE, signals(6, tokens=tokens), memory, float(now))
        assert replicas == wanted, now


@given(
    st.integers(1, 4),
    st.integers(4, 10),
    st.lists(st.tuples(st.floats(0, 20_000), st.floats(0, 100), st.floats(0, 1)), max_size=50),
)
def test_bounds_hold_and_a_steady_load_settles(
    low: int, high: int, samples: list[tuple[float, float, float]]
) -> None:
    rule = ScalingRule(low, high, 1000, 5.0, 0.9, up_after_s=2.0, down_after_s=3.0)
    replicas, memory = low, ScalingMemory()
    for now, (tokens, age, arena) in enumerate(samples):
        replicas, memory = decide(rule, signals(replicas, tokens, age, arena), memory, float(now))
        assert low <= replicas <= high
    if samples:
        # a load that does not change, and whose queue has gone, moves the number a few times at most
        tokens = samples[-1][0]
        seen = []
        for now in range(100, 160):
            replicas, memory = decide(rule, signals(replicas, tokens), memory, float(now))
            seen.append(replicas)
        assert len(set(seen[20:])) == 1
        assert replicas * 1000 >= tokens or replicas == high


def test_pools_together_take_no_more_gpus_than_there_are() -> None:
    ledger = GpuLedger()
    ledger.seed({"short": 2.0, "long": 4.0, "fixed": 1.0})
    assert ledger.grant("short", 2, 6, 1.0, total_gpus=8) == 3
    assert ledger.grant("long", 1, 2, 4.0, total_gpus=8) == 1
    # giving back is always granted, and what is there stays when GPUs have gone
    assert ledger.grant("short", 3, 1, 1.0, total_gpus=8) == 1
    assert ledger.grant("long", 1, 2, 4.0, total_gpus=10) == 2
    assert ledger.grant("long", 2, 2, 4.0, total_gpus=4) == 2
    # a pool of CPUs is not bound
    assert ledger.grant("cpu", 1, 5, 0.0, total_gpus=0) == 5
