"""One simulated replica: its engine, the account of its backlog, and what ingresses hear of it.

As the engine's actor does: all hear of the load when a request is taken; a frame with news carries it to the
ingresses whose requests have any, others hear of it ten times a second while it steps, and a second after it
has become idle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridserve.cluster.routing.cost import Backlog, Cost
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.engine import EngineModel, News, Sequence, SimulatedEngine
from hybridserve.cluster.simulation.outcomes import OK, Outcome
from hybridserve.cluster.simulation.workload import Arrival

_LOAD_PERIOD_S = 0.1
_IDLE_PERIOD_S = 1.0


@dataclass(eq=False, slots=True)
class Flight:
    """One request from its arrival to its end."""

    name: str
    arrival: Arrival
    cost: Cost
    ingress: int
    first_token_s: float | None = None
    tokens: int = 0

    def outcome(self, now: float, end: str = OK) -> Outcome:
        at = self.arrival.at_s
        first = None if self.first_token_s is None else self.first_token_s - at
        return Outcome(at, self.arrival.length, self.arrival.prompt_tokens, self.tokens, first, now - at, end)


class SimulatedReplica:
    """Serves what it is given.

    Args:
        ingresses: what each ingress knows of the pool's loads.
        on_end: called with every request that ends.
    """

    def __init__(
        self,
        name: str,
        model: EngineModel,
        clock: VirtualClock,
        ingresses: list[PoolLoads],
        report_s: float,
        on_end: Callable[["SimulatedReplica", Flight, str], None],
    ) -> None:
        self.name = name
        self.born_s = clock.now
        self.engine = SimulatedEngine(model, clock, self._on_news, report_s)
        self.backlog = Backlog(clock)
        self.held = 0
        """Requests that were sent to it and have not ended."""
        self._coming_tokens = 0
        """Of requests on their way."""
        self._clock = clock
        self._ingresses = ingresses
        self._on_end = on_end
        self._all_told_s = -_LOAD_PERIOD_S

    def remaining_tokens(self) -> int:
        """What is really left to compute, of requests on their way too."""
        return self.engine.remaining_tokens() + self._coming_tokens

    def expect(self, flight: Flight) -> None:
        """A request is on its way here: the replica is not idle from now on."""
        self.held += 1
        self._coming_tokens += flight.arrival.prompt_tokens + flight.arrival.answer_tokens

    def take(self, flight: Flight) -> None:
        """The request has arrived."""
        arrival = flight.arrival
        self._coming_tokens -= arrival.prompt_tokens + arrival.answer_tokens
        sequence = Sequence(flight.name, arrival.prompt_tokens, arrival.answer_tokens, flight)
        self.backlog.add(flight.name, flight.cost)
        try:
            self.engine.submit(sequence)
        except ValueError:
            self.backlog.end(flight.name)
            self._end(flight, "400 too long for the arena")
            return
        load = self.load()
        for loads in self._ingresses:
            loads.observe(self.name, load)
        self._ingresses[flight.ingress].accepted(flight.name)

    @property
    def arena_use(self) -> float:
        return min(1.0, self.engine.used_tokens / self.engine.model.arena_tokens)

    def load(self) -> ReplicaLoad:
        """As its frames' headers say."""
        backlog, engine = self.backlog, self.engine
        return ReplicaLoad(
            running=engine.running,
            waiting=engine.waiting,
            waiting_tokens=backlog.queued_tokens,
            # nobody here reads the arena's figures
            units_used=0,
            units_total=0,
            pages_used=0,
            pages_total=0,
            free_extents=0,
            step_ms=0.0,
            preemptions=engine.num_preemptions,
            steps=engine.num_steps,
            outstanding_tokens=backlog.outstanding_tokens,
            queued_tokens=backlog.queued_tokens,
            progressed_tokens=backlog.progressed_tokens,
            started_tokens=backlog.started_tokens,
            queue_age_s=backlog.queue_age_s(),
        )

    def _on_news(self, news: News) -> None:
        now = self._clock.now
        backlog = self.backlog
        for sequence, tokens in news.grown:
            flight: Any = sequence.tag
            if flight.first_token_s is None:
                flight.first_token_s = now
            flight.tokens += tokens
            backlog.progress(sequence.name, tokens)
        for sequence in news.ended:
            backlog.end(sequence.name)
        told = self._report({sequence.tag.ingress for sequence, _ in news.grown}, now)
        for sequence, tokens in news.grown:
            self._ingresses[sequence.tag.ingress].progress(sequence.name, tokens)
        for sequence in news.ended:
            self._end(sequence.tag, OK)
        if not told and not self.held:
            self._clock.at(now + _IDLE_PERIOD_S, self._report_idle)

    def _report(self, concerned: set[int], now: float) -> bool:
        """Send the load to these ingresses, or to all when it is time; returns whether all have it."""
        load = self.load()
        if not concerned or now - self._all_told_s >= _LOAD_PERIOD_S:
            self._all_told_s = now
            concerned = set(range(len(self._ingresses)))
        for index in concerned:
            self._ingresses[index].observe(self.name, load)
        return len(concerned) == len(self._ingresses)

    def _report_idle(self) -> None:
        if not self.held:
            self._report(set(), self._clock.now)

    def _end(self, flight: Flight, end: str) -> None:
        self.held -= 1
        self._ingresses[flight.ingress].end(flight.name)
        self._on_end(self, flight, end)
