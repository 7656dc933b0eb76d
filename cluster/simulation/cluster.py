"""A cluster in virtual time: ingresses with the router's own code, simulated replicas, and autoscaling.

Frames of the bus take no time here. A request takes `dispatch_s` from its ingress to its replica, and
`overhead_s` more until its client has the first token, for all that lies between client and engine.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from hybridserve.cluster.pool.interface import GenerationRequest, PoolBusy, PoolClient
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.cost import cost_of
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.scaling.gpu_ledger import GpuLedger
from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.outcomes import Outcome
from hybridserve.cluster.simulation.pool import Chooser, SimulatedPool, choose_by_loads
from hybridserve.cluster.simulation.replica import Flight
from hybridserve.cluster.simulation.scaling import PoolScaler, Scaling
from hybridserve.cluster.simulation.workload import Arrival
from hybridserve.replicas.sampling_params import SamplingParams

_PARAMS = SamplingParams()


@dataclass(frozen=True)
class PoolModel:
    """One pool."""

    spec: PoolSpec
    engine: EngineModel
    scaling: Scaling | None = None
    """None: it has its least number of replicas throughout."""
    claimed_gpus: float = 0.0
    """What its least number of replicas takes."""


@dataclass(frozen=True)
class ClusterModel:
    """What is simulated."""

    pools: tuple[PoolModel, ...]
    """By length, the last one's bucket without a bound."""
    num_ingress: int = 1
    dispatch_s: float = 0.001
    overhead_s: float = 0.0
    report_s: float = 0.05
    """The longest that rows go on without a report; a real engine sends one each step."""


@dataclass(frozen=True)
class PoolRun:
    """What became of one pool."""

    name: str
    most_replicas: int
    mean_replicas: float
    busy_share: float
    """Of the time of its replicas."""
    preemptions: int
    decisions: dict[str, int]


@dataclass(frozen=True)
class ClusterRun:
    """What a simulation gave."""

    outcomes: list[Outcome]
    """In the order of their ends."""
    pools: tuple[PoolRun, ...]
    seconds: float
    """Of virtual time, until the last request had ended."""
    num_events: int
    num_steps: int


class SimulatedCluster:
    """One simulation; run once. Equal models, arrivals and seeds give equal runs."""

    def __init__(self, model: ClusterModel, seed: int = 0, choose: Chooser = choose_by_loads) -> None:
        self.clock = VirtualClock()
        self._model = model
        self._choose = choose
        self._rng = random.Random(seed)
        self._left = 0
        self._outcomes: list[Outcome] = []
        self._ended_s = 0.0
        self.pools = {one.spec.name: self._make_pool(one) for one in model.pools}
        self._routed = [self._route_to_all() for _ in range(model.num_ingress)]
        self._routers = [LengthRouter(routed) for routed in self._routed]
        self._scalers: list[PoolScaler] = []
        claims = GpuLedger()
        claims.seed({one.spec.name: one.claimed_gpus for one in model.pools})
        for one in model.pools:
            pool = self.pools[one.spec.name]
            pool.scale_to(one.spec.replicas.min, 0.0)
            if one.scaling is not None:
                self._scalers.append(PoolScaler(pool, one.scaling, self.clock, claims))

    def run(self, arrivals: Sequence[Arrival]) -> ClusterRun:
        """Send all arrivals, and go on until the last has ended."""
        self._left = len(arrivals)
        self._send_next(iter(enumerate(sorted(arrivals, key=lambda one: one.at_s))))
        if not arrivals:
            self._stop()
        self.clock.run()
        assert self._left == 0, f"{self._left} requests never ended"
        pools = tuple(self._pool_run(pool) for pool in self.pools.values())
        num_steps = sum(pool.num_steps for pool in self.pools.values())
        return ClusterRun(self._outcomes, pools, self._ended_s, self.clock.num_events, num_steps)

    def is_over(self) -> bool:
        """Whether every request has ended."""
        return not self._left

    def _make_pool(self, model: PoolModel) -> SimulatedPool:
        return SimulatedPool(
            model.spec,
            model.engine,
            self.clock,
            self._model.dispatch_s,
            self._model.report_s,
            lambda flight, end: self._end(flight.outcome(self.clock.now, end)),
            self._choose,
        )

    def _route_to_all(self) -> list[RoutedPool]:
        """The pools as one ingress has them."""
        routed = []
        for pool in self.pools.values():
            loads = PoolLoads(random.Random(self._rng.random()), self.clock)
            pool.ingresses.append(loads)
            admission = Admission(pool.spec.name, pool.spec.limits, self._model.num_ingress)
            # only `generate` talks to clients, which nobody calls here
            routed.append(RoutedPool(pool.spec, cast(PoolClient, None), loads, admission))
        return routed

    def _send_next(self, arrivals: Iterator[tuple[int, Arrival]]) -> None:
        # one at a time: a million waiting events would make each slower
        following = next(arrivals, None)
        if following is not None:
            self.clock.at(following[1].at_s, self._arrive, *following, arrivals)

    def _arrive(self, index: int, arrival: Arrival, arrivals: Iterator[tuple[int, Arrival]]) -> None:
        self._send_next(arrivals)
        ingress = self._rng.randrange(self._model.num_ingress)
        stated = arrival.answer_tokens if arrival.says_max_tokens else None
        cost = cost_of(arrival.prompt_tokens, None, stated)
        flight = Flight(str(index), arrival, cost, ingress)
        request = GenerationRequest(flight.name, (), _PARAMS, stated, arrival.priority)
        try:
            pool = self._routers[ingress].admit(request, cost)
        except PoolBusy as busy:
            self._end(flight.outcome(self.clock.now, f"429 {busy.reason}"))
            return
        # prompts of a trace have no text to begin alike
        pool.loads.book(flight.name, cost)
        self.pools[pool.spec.name].send(flight)

    def _end(self, outcome: Outcome) -> None:
        self._left -= 1
        self._ended_s = self.clock.now
        extra = self._model.overhead_s
        if outcome.first_token_s is not None and extra:
            first, end = outcome.first_token_s + extra, outcome.end_s + extra
            outcome = replace(outcome, first_token_s=first, end_s=end)
        self._outcomes.append(outcome)
        if not self._left:
            self._stop()

    def _stop(self) -> None:
        for scaler in self._scalers:
            scaler.stop()

    def _pool_run(self, pool: SimulatedPool) -> PoolRun:
        pool.close()
        decisions: Counter[str] = Counter()
        for routed in self._routed:
            decisions.update(*(one.decisions for one in routed if one.spec is pool.spec))
        seconds = pool.replica_seconds()
        return PoolRun(
            pool.spec.name,
            pool.most_wanted,
            seconds / self.clock.now if self.clock.now else 0.0,
            pool.busy_s / seconds if seconds else 0.0,
            pool.num_preemptions,
            dict(decisions),
        )
