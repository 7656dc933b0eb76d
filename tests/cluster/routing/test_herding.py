"""Several ingresses over several replicas, with late reports: how far from one that knows everything?

Simulated around the router's own code (hybridserve.cluster.simulation). Run as a script it prints the table
of docs/performance.md.
"""

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.cluster.simulation.cluster import ClusterModel, PoolModel, SimulatedCluster
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.outcomes import quantiles
from hybridserve.cluster.simulation.pool import Chooser, SimulatedPool, choose_by_loads
from hybridserve.cluster.simulation.replica import Flight
from hybridserve.cluster.simulation.step_curve import StepCurve
from hybridserve.cluster.simulation.workload import Arrival

STEP_S = 0.01
SLOTS = 16
PREFILL_TOKENS = 512
"""A prompt's tokens that take one step of a replica to themselves."""
CURVE = StepCurve(
    "steps of 10 ms",
    decode_points=((1, STEP_S),),
    prefill_points=((1, STEP_S), (PREFILL_TOKENS, STEP_S)),
)
ENGINE = EngineModel(CURVE, max_num_seqs=SLOTS, max_num_batched_tokens=PREFILL_TOKENS)
OPEN = PoolLimits(10**9, 10**9, 1e9, 1.0, 1.0)
"""Nothing is refused."""


def by_truth(rng: random.Random) -> Chooser:
    """A central oracle: knows every replica's load of this instant, and how long each answer will be."""

    def choose(pool: SimulatedPool, flight: Flight) -> str:
        left = {name: pool.replicas[name].remaining_tokens() for name in pool.up}
        return min(pool.up, key=lambda name: (left[name], rng.random()))

    return choose


def by_reports(rng: random.Random) -> Chooser:
    """The least by the last reports, forgetting what was sent since: the herd."""

    def choose(pool: SimulatedPool, flight: Flight) -> str:
        reports = pool.ingresses[flight.ingress].reports()
        known = {name: reports[name].outstanding_tokens if name in reports else 0 for name in pool.up}
        return min(pool.up, key=lambda name: (known[name], rng.random()))

    return choose


def by_chance(rng: random.Random) -> Chooser:
    return lambda pool, flight: rng.choice(pool.up)


def by_loads(rng: random.Random) -> Chooser:
    return choose_by_loads


@dataclass(frozen=True)
class Outcome:
    imbalance: float
    """The fullest replica's outstanding tokens over the mean, less 1, over time; 0 is perfect."""
    first_token_p50_s: float
    first_token_p99_s: float


def simulate(
    make: Callable[[random.Random], Chooser], num_ingress: int, num_replicas: int, seconds: float, load: float
) -> Outcome:
    """Poisson arrivals at `load` times what the replicas can do; half of the clients say `max_tokens`."""
    rng = random.Random(1)
    # one request holds a slot for its answer's steps, and all slots for its prompt's
    rate = load * num_replicas / (100 / SLOTS + 1.0) / STEP_S
    arrivals, at = [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt = min(4000, max(1, int(rng.lognormvariate(5.5, 1.0))))
        told = rng.random() < 0.5
        arrivals.append(Arrival(at, prompt, 1 + int(rng.expovariate(1 / 100)), says_max_tokens=told))
    spec = PoolSpec("pool", 0, None, 1, ReplicaRange(num_replicas, num_replicas), (), OPEN)
    # reports with every step, as engines send them
    model = ClusterModel((PoolModel(spec, ENGINE),), num_ingress, dispatch_s=STEP_S, report_s=STEP_S)
    cluster = SimulatedCluster(model, seed=2, choose=make(rng))
    imbalances: list[float] = []

    def look() -> None:
        left = [replica.remaining_tokens() for replica in cluster.pools["pool"].replicas.values()]
        if sum(left) and seconds / 5 < cluster.clock.now:
            imbalances.append(max(left) / statistics.fmean(left) - 1)
        if cluster.clock.now < seconds:
            cluster.clock.at(cluster.clock.now + STEP_S, look)

    cluster.clock.at(0.0, look)
    run = cluster.run(arrivals)
    waits = quantiles([one.first_token_s for one in run.outcomes if one.first_token_s is not None])
    return Outcome(statistics.fmean(imbalances), waits.p50, waits.p99)


def test_ingresses_do_not_herd() -> None:
    def imbalance(choose: Callable[[random.Random], Chooser], num_ingress: int) -> float:
        return simulate(choose, num_ingress, num_replicas=8, seconds=8, load=1.0).imbalance

    oracle, chance = imbalance(by_truth, 1), imbalance(by_chance, 8)
    alone, together = imbalance(by_loads, 1), imbalance(by_loads, 8)
    assert alone < 0.5 * chance and together < 0.5 * chance
    # the oracle knows how long answers will be, which nobody can
    assert max(alone, together) < 2.5 * oracle
    assert together < 1.5 * alone


def main() -> None:
    sys.stdout.write("choice, ingresses, replicas: imbalance, first token p50, p99 in ms\n")
    for num_replicas in (4, 16):
        for num_ingress in (1, 4, 16):
            for choose in (by_truth, by_loads, by_reports, by_chance):
                out = simulate(choose, num_ingress, num_replicas, seconds=20, load=1.0)
                sys.stdout.write(
                    f"{choose.__name__:10} {num_ingress:2} {num_replicas:2}: {out.imbalance:.3f} "
                    f"{out.first_token_p50_s * 1e3:.0f} {out.first_token_p99_s * 1e3:.0f}\n"
                )


if __name__ == "__main__":
    main()
