"""One simulated pool: the replicas that are up, the choice among them, and those that come and go."""

from collections import deque
from collections.abc import Callable

from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.scaling.policy import PoolSignals
from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.replica import Flight, SimulatedReplica


class SimulatedPool:
    """The replicas of one pool.

    Args:
        dispatch_s: from the choice of a replica to the request's arrival there.
        on_end: called with every request that ends, and how.
    """

    def __init__(
        self,
        spec: PoolSpec,
        engine: EngineModel,
        clock: VirtualClock,
        dispatch_s: float,
        report_s: float,
        on_end: Callable[[Flight, str], None],
    ) -> None:
        self.spec = spec
        self.ingresses: list[PoolLoads] = []
        """What each ingress knows of this pool; filled before the first replica comes."""
        self.wanted = 0
        """Replicas that are up or starting."""
        self.most_wanted = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.busy_s = 0.0
        """Of all replicas, also those that are gone."""
        self._engine = engine
        self._clock = clock
        self._dispatch_s = dispatch_s
        self._report_s = report_s
        self._on_end = on_end
        self._up: list[str] = []
        self._replicas: dict[str, SimulatedReplica] = {}
        """Up, and draining."""
        self._draining: set[SimulatedReplica] = set()
        self._unrouted: deque[Flight] = deque()
        self._made = 0
        self._wanted_since = 0.0
        self._replica_s = 0.0

    def send(self, flight: Flight) -> None:
        """Give an admitted and booked request to a replica, now or when there is one."""
        if not self._up:
            self._unrouted.append(flight)
            return
        loads = self.ingresses[flight.ingress]
        name = loads.choose(self._up, flight.name)[0]
        loads.routed(flight.name, name)
        replica = self._replicas[name]
        # from now on: a replica that drains waits for those that are on their way
        replica.held += 1
        self._clock.at(self._clock.now + self._dispatch_s, replica.take, flight)

    def scale_to(self, wanted: int, start_s: float) -> None:
        """Have so many replicas: new ones serve after `start_s`, those that go end what they have first."""
        self._count_time()
        more = wanted - self.wanted
        self.wanted, self.most_wanted = wanted, max(wanted, self.most_wanted)
        if more > 0:
            self._clock.at(self._clock.now + start_s, self._start, more)
        while len(self._up) > wanted:
            self._drain()

    def signals(self) -> PoolSignals:
        """What the replicas report for autoscaling."""
        replicas = [self._replicas[name] for name in self._up]
        return PoolSignals(
            replicas=self.wanted,
            reporting=len(replicas),
            outstanding_tokens=sum(one.backlog.outstanding_tokens for one in replicas),
            queue_age_s=max((one.backlog.queue_age_s() for one in replicas), default=0.0),
            arena_use=sum(one.arena_use for one in replicas) / len(replicas) if replicas else 0.0,
            unrouted_requests=len(self._unrouted),
        )

    def replica_seconds(self) -> float:
        """Replicas that were wanted, over time."""
        self._count_time()
        return self._replica_s

    def close(self) -> None:
        """Count what is left, at the end of a simulation."""
        for replica in self._replicas.values():
            self._count(replica)
        self._replicas.clear()

    def _start(self, count: int) -> None:
        # some may not be wanted any more
        for _ in range(min(count, self.wanted - len(self._up))):
            name = f"{self.spec.name}-{self._made}"
            self._made += 1
            self._replicas[name] = SimulatedReplica(
                name, self._engine, self._clock, self.ingresses, self._report_s, self._ended
            )
            self._up.append(name)
        self._tell()
        while self._unrouted:
            self.send(self._unrouted.popleft())

    def _drain(self) -> None:
        """The youngest gets no more requests, and goes when it has none."""
        replica = self._replicas[self._up.pop()]
        self._tell()
        if replica.held:
            self._draining.add(replica)
        else:
            self._drop(replica)

    def _tell(self) -> None:
        for loads in self.ingresses:
            loads.set_replicas(self._up)

    def _ended(self, replica: SimulatedReplica, flight: Flight, end: str) -> None:
        self._on_end(flight, end)
        if not replica.held and replica in self._draining:
            self._draining.remove(replica)
            self._drop(replica)

    def _drop(self, replica: SimulatedReplica) -> None:
        self._count(replica)
        del self._replicas[replica.name]

    def _count(self, replica: SimulatedReplica) -> None:
        self.num_steps += replica.engine.num_steps
        self.num_preemptions += replica.engine.num_preemptions
        self.busy_s += replica.engine.busy_s

    def _count_time(self) -> None:
        now = self._clock.now
        self._replica_s += self.wanted * (now - self._wanted_since)
        self._wanted_since = now
