"""Simulated clusters: nothing is lost, equal seeds are equal, pools and scaling do what they are for."""

import random
from collections import Counter

import pytest

from hybridserve.cluster.routing.pool_spec import PoolLimits
from hybridserve.cluster.scaling.policy import ScalingRule
from hybridserve.cluster.simulation.cluster import ClusterModel, PoolModel, SimulatedCluster
from hybridserve.cluster.simulation.outcomes import OK
from hybridserve.cluster.simulation.scaling import Scaling
from hybridserve.cluster.simulation.step_curve import StepCurve
from hybridserve.cluster.simulation.workload import Arrival

LIMITS = PoolLimits(40, 6000, 5.0, 0.9, 0.5)


def mixed(count: int, rate: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    at, out = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        prompt = rng.choice([20, 60, 200, 3000])
        priority = rng.choice(["high", "normal", "low"])
        out.append(Arrival(at, prompt, rng.randrange(1, 80), priority, rng.random() < 0.7))
    return out


def two_pools(constant_steps, pool_spec, **model: object) -> ClusterModel:
    curve = StepCurve("by hand", ((1, 0.01), (16, 0.02)), ((1, 0.01), (100, 0.02), (2048, 0.4)))
    engine = constant_steps()
    engine = type(engine)(curve, 16, 2048, arena_tokens=8000, unit_tokens=100)
    short = pool_spec("short", 2, up_to=256, borrows=("long",), limits=LIMITS)
    long = pool_spec("long", 2, above=256, limits=LIMITS)
    return ClusterModel((PoolModel(short, engine), PoolModel(long, engine)), **model)


@pytest.mark.parametrize(("rate", "refuses"), [(0.02, False), (60.0, True)])
def test_every_request_ends_once(rate: float, refuses: bool, constant_steps, pool_spec) -> None:
    arrivals = mixed(800, rate, 1)
    run = SimulatedCluster(two_pools(constant_steps, pool_spec, num_ingress=3), seed=1).run(arrivals)
    assert Counter(one.at_s for one in run.outcomes) == Counter(one.at_s for one in arrivals)
    wanted = {one.at_s: one for one in arrivals}
    for one in run.outcomes:
        if one.end == OK:
            assert one.tokens == wanted[one.at_s].answer_tokens and 0 < one.first_token_s <= one.end_s
        else:
            assert one.end.startswith("429 ") and one.tokens == 0 and one.end_s == 0
    assert any(one.end != OK for one in run.outcomes) == refuses
    decided = sum(sum(pool.decisions.values()) for pool in run.pools)
    assert decided == sum(one.end == OK for one in run.outcomes)


def test_equal_seeds_are_equal_runs(constant_steps, pool_spec) -> None:
    arrivals = mixed(300, 20.0, 2)
    model = two_pools(constant_steps, pool_spec, num_ingress=4)
    runs = [SimulatedCluster(model, seed).run(arrivals) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0].outcomes != runs[2].outcomes


def test_short_requests_borrow_and_do_not_wait_for_long_ones(constant_steps, pool_spec) -> None:
    """A pool of long prompts keeps them from the short ones' first tokens; and it lends while it is idle."""
    model = two_pools(constant_steps, pool_spec)
    shorts = [Arrival(0.05 * at, 60, 10) for at in range(400)]
    longs = [Arrival(0.4 * at, 3000, 10) for at in range(50)]

    def slowest(arrivals: list[Arrival]) -> float:
        run = SimulatedCluster(model, seed=1).run(arrivals)
        return max(one.first_token_s for one in run.outcomes if one.length <= 256 and one.end == OK)

    assert slowest(shorts + longs) < 2 * slowest(shorts)
    flood = SimulatedCluster(model, seed=1).run([Arrival(0.004 * at, 60, 40) for at in range(600)])
    assert flood.pools[1].decisions["borrowed"] > 0


def scaling_run(constant_steps, pool_spec, replicas: tuple[int, int], max_gpus: float):
    rule = ScalingRule(*replicas, 300, 1.0, 0.9, up_after_s=2.0, down_after_s=10.0)
    spec = pool_spec("pool", replicas)
    scaling = Scaling(rule, gpus_per_replica=1.0, max_gpus=max_gpus, start_s=5.0)
    engine = constant_steps(0.05)
    model = ClusterModel((PoolModel(spec, engine, scaling, float(replicas[0])),))
    busy = [Arrival(20 + 0.05 * at, 50, 40) for at in range(1200)]
    calm = [Arrival(100 + 2.0 * at, 50, 40) for at in range(60)]
    return SimulatedCluster(model, seed=1).run(busy + calm)


def test_a_pool_grows_with_its_load_and_shrinks_after(constant_steps, pool_spec) -> None:
    run = scaling_run(constant_steps, pool_spec, (1, 8), 8.0)
    assert len(run.outcomes) == 1260 and all(one.end == OK for one in run.outcomes)
    pool = run.pools[0]
    assert pool.most_replicas > 3 and 1 < pool.mean_replicas < pool.most_replicas - 1
    capped = scaling_run(constant_steps, pool_spec, (1, 8), 2.0)
    assert capped.pools[0].most_replicas == 2 and len(capped.outcomes) == 1260


def test_from_nothing_the_first_request_waits_for_a_start(constant_steps, pool_spec) -> None:
    run = scaling_run(constant_steps, pool_spec, (0, 8), 8.0)
    assert len(run.outcomes) == 1260
    first = min(run.outcomes, key=lambda one: one.at_s)
    assert 5.0 < first.first_token_s < 8.0


def test_an_empty_load(constant_steps, pool_spec) -> None:
    run = SimulatedCluster(two_pools(constant_steps, pool_spec)).run([])
    assert run.outcomes == [] and run.seconds == 0.0
