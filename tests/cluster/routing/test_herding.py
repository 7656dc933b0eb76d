"""Several ingresses over several replicas, with late reports: how far from one that knows everything?

A simulation in steps of an engine over the router's own code. Run as a script it prints the table of
docs/performance.md.
"""

import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridserve.cluster.routing.cost import Backlog, Cost
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads

STEP_S = 0.01
SLOTS = 16
PREFILL_TOKENS = 512
"""A prompt's tokens that take one step of a replica to themselves."""
REPORT_STEPS = 10
"""Between two reports to an ingress that has nothing running on a replica."""


@dataclass
class Request:
    name: str
    ingress: int
    arrival: int
    prompt: int
    answer: int
    told: bool
    """Whether the client said how long the answer may be; if not, the router goes by what is usual."""

    @property
    def cost(self) -> Cost:
        return Cost(self.prompt, self.answer if self.told else 256)


@dataclass
class Replica:
    """Slots that make a token a step; one prompt is computed at a time, and holds the others up."""

    name: str
    backlog: Backlog = field(default_factory=Backlog)
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[str, tuple[Request, int]] = field(default_factory=dict)
    prefill_steps: int = 0
    arrived: list[Request] = field(default_factory=list)

    def outstanding(self) -> int:
        """In truth: what is really still to compute."""
        return sum(one.prompt + one.answer for one in (*self.waiting, *self.arrived)) + sum(
            one.answer - made for one, made in self.running.values()
        )

    def step(self) -> list[tuple[Request, bool]]:
        """The requests that got a token, and whether it was their last."""
        if self.prefill_steps > 1:
            self.prefill_steps -= 1
            return []
        news = []
        for request, made in list(self.running.values()):
            self.running[request.name] = (request, made + 1)
            self.backlog.progress(request.name, 1)
            last = made + 1 >= request.answer
            if last:
                del self.running[request.name]
                self.backlog.end(request.name)
            news.append((request, last))
        if self.waiting and len(self.running) < SLOTS:
            request = self.waiting.popleft()
            self.running[request.name] = (request, 0)
            self.prefill_steps = -(-request.prompt // PREFILL_TOKENS)
        return news

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            *[0] * 11,
            outstanding_tokens=self.backlog.outstanding_tokens,
            queued_tokens=self.backlog.queued_tokens,
            progressed_tokens=self.backlog.progressed_tokens,
        )


Chooser = Callable[[PoolLoads, Sequence[Replica], Request, random.Random], str]


def by_loads(loads: PoolLoads, replicas: Sequence[Replica], request: Request, rng: random.Random) -> str:
    return loads.choose([one.name for one in replicas], request.name)[0]


def by_truth(loads: PoolLoads, replicas: Sequence[Replica], request: Request, rng: random.Random) -> str:
    """A central oracle: knows every replica's load of this instant, and how long each answer will be."""
    return min(replicas, key=lambda one: (one.outstanding(), rng.random())).name


def by_reports(loads: PoolLoads, replicas: Sequence[Replica], request: Request, rng: random.Random) -> str:
    """The least by the last reports, forgetting what was sent since: the herd."""
    reports = loads.reports()
    known = {one.name: reports[one.name].outstanding_tokens if one.name in reports else 0 for one in replicas}
    return min(known, key=lambda name: (known[name], rng.random()))


def by_chance(loads: PoolLoads, replicas: Sequence[Replica], request: Request, rng: random.Random) -> str:
    return rng.choice(replicas).name


@dataclass(frozen=True)
class Outcome:
    imbalance: float
    """The fullest replica's outstanding tokens over the mean, less 1, over all steps; 0 is perfect."""
    first_token_p50_s: float
    first_token_p99_s: float


def simulate(choose: Chooser, num_ingress: int, num_replicas: int, seconds: float, load: float) -> Outcome:
    """Poisson arrivals at `load` times what the replicas can do."""
    rng = random.Random(1)
    now = 0
    loads = [PoolLoads(random.Random(i), lambda: now * STEP_S) for i in range(num_ingress)]
    replicas = [Replica(f"r{i}") for i in range(num_replicas)]
    by_name = {one.name: one for one in replicas}
    for one in loads:
        one.set_replicas(by_name)
    # one request holds a slot for its answer's steps, and all slots for its prompt's
    steps_each = 100 / SLOTS + 1.5
    rate = load * num_replicas / steps_each
    imbalances, waits = [], []
    count = 0
    for now in range(int(seconds / STEP_S)):  # noqa: B007
        for replica in replicas:
            for request in replica.arrived:
                replica.waiting.append(request)
                replica.backlog.add(request.name, request.cost)
            accepted, replica.arrived = replica.arrived, []
            news = replica.step()
            busy = {request.ingress for request, _ in news} | {request.ingress for request in accepted}
            for index, one in enumerate(loads):
                if index in busy or now % REPORT_STEPS == 0:
                    one.observe(replica.name, replica.load())
            for request in accepted:
                loads[request.ingress].accepted(request.name)
            for request, last in news:
                if request.arrival >= 0:
                    waits.append((now - request.arrival) * STEP_S)
                    request.arrival = -1
                loads[request.ingress].progress(request.name, 1)
                if last:
                    loads[request.ingress].end(request.name)
        arrivals = 0
        threshold = rng.random()
        # a Poisson number by inversion
        probability = cumulative = math.exp(-rate)
        while threshold > cumulative:
            arrivals += 1
            probability *= rate / arrivals
            cumulative += probability
        for _ in range(arrivals):
            prompt = min(4000, int(rng.lognormvariate(5.5, 1.0)))
            answer = 1 + int(rng.expovariate(1 / 100))
            request = Request(
                f"q{count}", rng.randrange(num_ingress), now, prompt, answer, rng.random() < 0.5
            )
            count += 1
            own = loads[request.ingress]
            own.book(request.name, request.cost)
            name = choose(own, replicas, request, rng)
            own.routed(request.name, name)
            by_name[name].arrived.append(request)
        if now * STEP_S > seconds / 5:
            tokens = [one.outstanding() for one in replicas]
            if sum(tokens):
                imbalances.append(max(tokens) / statistics.fmean(tokens) - 1)
    waits.sort()
    return Outcome(statistics.fmean(imbalances), waits[len(waits) // 2], waits[int(len(waits) * 0.99)])


def test_ingresses_do_not_herd() -> None:
    def imbalance(choose: Chooser, num_ingress: int) -> float:
        return simulate(choose, num_ingress, num_replicas=8, seconds=8, load=1.1).imbalance

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
                out = simulate(choose, num_ingress, num_replicas, seconds=20, load=1.1)
                sys.stdout.write(
                    f"{choose.__name__:10} {num_ingress:2} {num_replicas:2}: {out.imbalance:.3f} "
                    f"{out.first_token_p50_s * 1e3:.0f} {out.first_token_p99_s * 1e3:.0f}\n"
                )


if __name__ == "__main__":
    main()
