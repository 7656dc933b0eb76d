"""One simulated pool: the replicas that are up, the choice among them, and those that come and go."""

from collections import deque
from collections.abc import Callable

from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.scaling.policy import PoolSignals
from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.engine import EngineModel
from hybridserve.cluster.simulation.replica import Flight, SimulatedReplica

Chooser = Callable[["SimulatedPool", Flight], str]
"""The name of the replica that gets a request, one of `SimulatedPool.up`."""


def choose_by_loads(pool: "SimulatedPool", flight: Flight) -> str:
    """As Serve's request router does for us."""
    return pool.ingresses[flight.ingress].choose(pool.up, flight.name)[0]


class SimulatedPool:
    """The replicas of one pool.

    Args:
        choose: which replica gets a request.
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
        choose: Chooser,
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
        self._choose = choose
        self.up: list[str] = []
        """Names of the replicas that take requests."""
        self.replicas: dict[str, SimulatedReplica] = {}
        """Those, and those that drain."""
        self._draining: set[SimulatedReplica] = set()
        self._unrouted: deque[Flight] = deque()
        self._made = 0
        self._wanted_since = 0.0
        self._replica_s = 0.0

    def send(self, flight: Flight) -> None:
        """Give an admitted and booked request to a replica, now or when there is one."""
        if not self.up:
            self._unrouted.append(flight)
            return
        name = self._choose(self, flight)
        self.ingresses[flight.ingress].routed(flight.name, name)
        replica = self.replicas[name]
        replica.expect(flight)
        self._clock.at(self._clock.now + self._dispatch_s, replica.take, flight)

    def scale_to(self, wanted: int, start_s: float) -> None:
        """Have so many replicas: new ones serve after `start_s`, those that go end what they have first."""
        self._count_time()
        more = wanted - self.wanted
        self.wanted, self.most_wanted = wanted, max(wanted, self.most_wanted)
        if more > 0:
            self._clock.at(self._clock.now + start_s, self._start, more)
        while len(self.up) > wanted:
            self._drain()

    def signals(self) -> PoolSignals:
        """What the replicas report for autoscaling."""
        replicas = [self.replicas[name] for name in self.up]
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
        for replica in self.replicas.values():
            self._count(replica)
        self.replicas.clear()

    def _start(self, count: int) -> None:
        # some may not be wanted any more
        for _ in range(min(count, self.wanted - len(self.up))):
            name = f"{self.spec.name}-{self._made}"
            self._made += 1
            self.replicas[name] = SimulatedReplica(
                name, self._engine, self._clock, self.ingresses, self._report_s, self._ended
            )
            self.up.append(name)
        self._tell()
        while self._unrouted:
            self.send(self._unrouted.popleft())

    def _drain(self) -> None:
        """The youngest gets no more requests, and goes when it has none."""
        replica = self.replicas[self.up.pop()]
        self._tell()
        if replica.held:
            self._draining.add(replica)
        else:
            self._drop(replica)

    def _tell(self) -> None:
        for loads in self.ingresses:
            loads.set_replicas(self.up)

    def _ended(self, replica: SimulatedReplica, flight: Flight, end: str) -> None:
        self._on_end(flight, end)
        if not replica.held and replica in self._draining:
            self._draining.remove(replica)
            self._drop(replica)

    def _drop(self, replica: SimulatedReplica) -> None:
        self._count(replica)
        del self.replicas[replica.name]

    def _count(self, replica: SimulatedReplica) -> None:
        self.num_steps += replica.engine.num_steps
        self.num_preemptions += replica.engine.num_preemptions
        self.busy_s += replica.engine.busy_s

    def _count_time(self) -> None:
        now = self._clock.now
        self._replica_s += self.wanted * (now - self._wanted_since)
        self._wanted_since = now
