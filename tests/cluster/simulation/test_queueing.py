"""The simulator against queues whose waits are known in closed form."""

import random
import statistics

import pytest

from hybridserve.cluster.simulation.cluster import ClusterModel, ClusterRun, PoolModel, SimulatedCluster
from hybridserve.cluster.simulation.workload import Arrival

TOKEN_S = 1e-4


def run(engine, spec, arrivals, seed: int = 0, num_ingress: int = 1) -> ClusterRun:
    model = ClusterModel((PoolModel(spec, engine),), num_ingress, dispatch_s=0.0)
    return SimulatedCluster(model, seed).run(arrivals)


def arrivals_of(rate: float, count: int, seed: int, prompt_of) -> list[Arrival]:
    rng = random.Random(seed)
    at, out = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        out.append(Arrival(at, prompt_of(rng), 1))
    return out


def mean_wait(found: ClusterRun) -> float:
    """In the queue, without service."""
    return statistics.fmean(one.end_s - TOKEN_S * one.prompt_tokens for one in found.outcomes)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_of_equal_requests(load: float, one_server, pool_spec) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) service times."""
    arrivals = arrivals_of(load, 10_000, 1, lambda rng: 10_000)
    found = run(one_server(TOKEN_S), pool_spec(), arrivals)
    assert mean_wait(found) == pytest.approx(load / (2 * (1 - load)), rel=0.12)
    assert found.pools[0].busy_share == pytest.approx(load, rel=0.03)


def test_one_server_of_exponential_requests(one_server, pool_spec) -> None:
    """M/M/1: the whole time is exponential with mean 1 / (1 - load) service times."""
    load = 0.5
    arrivals = arrivals_of(load, 15_000, 2, lambda rng: max(1, round(rng.expovariate(1e-4))))
    ordered = sorted(one.end_s for one in run(one_server(TOKEN_S), pool_spec(), arrivals).outcomes)
    assert statistics.fmean(ordered) == pytest.approx(1 / (1 - load), rel=0.1)
    assert ordered[len(ordered) // 2] == pytest.approx(0.693 / (1 - load), rel=0.1)
    assert ordered[int(0.99 * len(ordered))] == pytest.approx(4.605 / (1 - load), rel=0.15)


def test_choosing_by_load_lies_between_one_queue_and_chance(one_server, pool_spec) -> None:
    """Four servers: longer than M/D/4's wait (Cosmetatos), far shorter than that of M/D/1 for each."""
    load, servers = 0.8, 4
    arrivals = arrivals_of(load * servers, 8_000, 3, lambda rng: 10_000)
    wait = mean_wait(run(one_server(TOKEN_S), pool_spec(replicas=servers), arrivals, num_ingress=2))
    by_chance = load / (2 * (1 - load))
    assert 0.37 * 0.95 < wait < 0.5 * by_chance


def test_without_a_queue_requests_take_their_steps(constant_steps, pool_spec) -> None:
    rng = random.Random(4)
    arrivals = [Arrival(10.0 * at, rng.randrange(1, 2000), rng.randrange(2, 50)) for at in range(100)]
    found = run(constant_steps(0.01), pool_spec(), arrivals)
    for one in found.outcomes:
        assert one.first_token_s == pytest.approx(0.01)
        assert one.per_token_s == pytest.approx(0.01)
        assert one.end_s == pytest.approx(0.01 * one.tokens)


def test_more_than_there_is_capacity_for_is_served_at_capacity(one_server, pool_spec) -> None:
    arrivals = arrivals_of(3.0, 3000, 5, lambda rng: 10_000)
    found = run(one_server(TOKEN_S), pool_spec(replicas=2), arrivals)
    assert found.seconds == pytest.approx(3000 / 2, rel=0.02)
    assert found.pools[0].busy_share == pytest.approx(1.0, abs=0.02)
