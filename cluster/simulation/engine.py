"""One simulated engine: the scheduler's rules of replicas/engine, and steps that take what a curve says.

Decode rows come first, then chunks of running prompts, then newcomers in their order, all under one budget of
tokens. Steps of decode rows alone are taken many at a time, which changes nothing that can be seen from
outside but how often it is reported. The arena is counted in tokens, a sequence's unit as so many of them.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.step_curve import StepCurve
from hybridserve.replicas.engine.scheduler import CHUNK_ALIGN


def chunk_tokens(computed: int, total: int, budget: int, first: bool) -> int:
    """How many tokens of a prompt a step computes, by the scheduler's rule; 0: it waits for another step."""
    if total - computed <= budget:
        return total - computed
    if budget < CHUNK_ALIGN:
        return budget if first else 0
    return (computed + budget) // CHUNK_ALIGN * CHUNK_ALIGN - computed


@dataclass(frozen=True)
class EngineModel:
    """What all replicas of a pool are."""

    curve: StepCurve
    max_num_seqs: int
    max_num_batched_tokens: int
    arena_tokens: float = float("inf")
    """How many tokens' pages the arena holds."""
    unit_tokens: float = 0.0
    """A sequence's states, as so many tokens' pages, and half a page that is not full."""
    overlaps: bool = False
    """Whether a step is planned while the one before it runs: newcomers then wait a step longer."""

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs must be at most max_num_batched_tokens, got {self.max_num_seqs} and "
                f"{self.max_num_batched_tokens}"
            )


@dataclass(eq=False, slots=True)
class Sequence:
    """One request in an engine."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    tag: object = None
    """The caller's."""
    total: int = 0
    """Tokens to compute before the next is drawn: the prompt, after a preemption the answer so far too."""
    computed: int = 0
    made: int = 0
    """Of the answer, at the step count `since`."""
    since: int = 0
    reported: int = 0
    """Tokens of the answer that the caller knows of."""
    decoding: bool = False
    epoch: int = 0
    """Preemptions."""


@dataclass
class News:
    """What the caller is told after a step: all that have new tokens, and which of them have ended."""

    grown: list[tuple[Sequence, int]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


class SimulatedEngine:
    """One replica's engine.

    Args:
        on_news: called at the end of a step, or of several equal ones.
        report_s: the longest that steps of decode rows go on without news.
    """

    def __init__(
        self, model: EngineModel, clock: VirtualClock, on_news: Callable[[News], None], report_s: float
    ) -> None:
        self.model = model
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.used_tokens = 0.0
        self._clock = clock
        self._on_news = on_news
        self._report_s = report_s
        self._arrived: deque[tuple[float, Sequence]] = deque()
        """Since steps were planned last, and when."""
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """Oldest first."""
        self._chunks: list[tuple[Sequence, int]] = []
        """Of the running step."""
        self._prefilling: list[Sequence] = []
        self._rows: dict[Sequence, None] = {}
        """Decode rows."""
        self._ends: list[tuple[int, int, int, Sequence]] = []
        """(step count, order, epoch, row) at which rows make their last token."""
        self._order = itertools.count()
        self._context = 0
        """Tokens of all decode rows' contexts."""
        self._began = 0.0
        self._step_s = 0.0
        self._planned = 0
        """Steps from `_began` on; 0: idle."""
        self._just_ended: tuple[int, float] = (0, 0.0)
        """Sequences that the last step ended, and what they held of the arena."""
        self._version = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._arrived)

    @property
    def rows(self) -> int:
        return len(self._rows)

    def remaining_tokens(self) -> int:
        """What is really left to compute, prompts and answers, of all requests here."""
        left = sum(one.answer_tokens - one.made - self.num_steps + one.since for one in self._rows)
        arrived = (one for _, one in self._arrived)
        for one in itertools.chain(arrived, self._waiting, self._prefilling):
            left += one.total - one.computed + one.answer_tokens - one.made
        return left

    def submit(self, sequence: Sequence) -> None:
        """Take a request in now.

        Raises:
            ValueError: it would not fit an empty arena.
        """
        needed = self.model.unit_tokens + sequence.prompt_tokens + sequence.answer_tokens
        if needed > self.model.arena_tokens:
            raise ValueError(
                f"a request of {sequence.prompt_tokens} and {sequence.answer_tokens} tokens needs an arena "
                f"of {needed:.0f} tokens, this one has {self.model.arena_tokens:.0f}"
            )
        sequence.total = sequence.prompt_tokens
        self._arrived.append((self._clock.now, sequence))
        if not self._planned:
            self._begin(self._clock.now)
        elif self._planned > 1:
            self._cut_short()

    def _cut_short(self) -> None:
        """Somebody has come amid many equal steps: they end when a newcomer would be planned for."""
        if self._waiting or len(self._running) >= self.model.max_num_seqs:
            return
        in_progress = int((self._clock.now - self._began) / self._step_s) + 1
        # what is planned while a step runs is planned by who was there when it began
        steps = in_progress + self.model.overlaps
        if steps < self._planned:
            self._planned = steps
            self._end_at(self._began + steps * self._step_s)

    def _begin(self, known_s: float) -> None:
        """Plan and begin the next step, or wait for work. Who came after `known_s` is not known yet."""
        while self._arrived and self._arrived[0][0] <= known_s:
            self._waiting.append(self._arrived.popleft()[1])
        self._plan()
        self._just_ended = (0, 0.0)
        if not self._chunks and not self._rows and (self._arrived or self._waiting):
            # nothing could be planned ahead, so it is planned now
            self._waiting.extend(one for _, one in self._arrived)
            self._arrived.clear()
            self._plan()
        rows, tokens = len(self._rows), sum(count for _, count in self._chunks)
        if not rows and not tokens:
            assert not self._waiting, "requests wait but none can be scheduled"
            self._planned = 0
            return
        before = sum(count * one.computed for one, count in self._chunks)
        self._step_s = self.model.curve.step_s(rows, self._context, tokens, before)
        self._began = self._clock.now
        self._planned = 1 if tokens else self._equal_steps(rows)
        if self._planned > 1:
            # of the mean context
            context = self._context + rows * (self._planned - 1) / 2
            self._step_s = self.model.curve.decode_s(rows, context)
        self._end_at(self._began + self._planned * self._step_s)

    def _end_at(self, time_s: float) -> None:
        self._version += 1
        self._clock.at(time_s, self._end, self._version)

    def _equal_steps(self, rows: int) -> int:
        """How many steps of these rows can be taken at once."""
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.num_steps
        if self.model.overlaps and (self._arrived or self._waiting):
            # the next step may take them in, as what ended of late is free by then
            return 1
        if self._step_s > 0:
            steps = min(steps, int(self._report_s / self._step_s))
        return max(1, int(min(steps, (self.model.arena_tokens - self.used_tokens) / rows)))

    def _is_current(self, end: tuple[int, int, int, Sequence]) -> bool:
        return end[2] == end[3].epoch

    def _end(self, version: int) -> None:
        """The running steps are over."""
        if version != self._version:
            return
        steps, rows = self._planned, len(self._rows)
        self.busy_s += self._clock.now - self._began
        self.num_steps += steps
        self._context += rows * steps
        self.used_tokens += rows * steps
        # a step is planned when the one before it begins, where steps overlap
        known_s = self._clock.now - self._step_s if self.model.overlaps else self._clock.now
        news = News()
        while self._ends and self._ends[0][0] <= self.num_steps:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                news.ended.append(end[3])
        for one in self._rows:
            made = one.made + self.num_steps - one.since
            news.grown.append((one, made - one.reported))
            one.reported = made
        self._end_chunks(news)
        held = self.used_tokens
        for one in news.ended:
            self._remove(one)
        if self.model.overlaps:
            self._just_ended = (len(news.ended), held - self.used_tokens)
        self._on_news(news)
        self._begin(known_s)

    def _end_chunks(self, news: News) -> None:
        for one, count in self._chunks:
            one.computed += count
            if one.computed < one.total:
                continue
            self._prefilling.remove(one)
            one.made += 1
            one.since = self.num_steps
            one.decoding = True
            self._rows[one] = None
            self._context += one.prompt_tokens + one.made
            news.grown.append((one, one.made - one.reported))
            one.reported = one.made
            if one.made >= one.answer_tokens:
                news.ended.append(one)
            else:
                last = self.num_steps + one.answer_tokens - one.made
                heapq.heappush(self._ends, (last, next(self._order), one.epoch, one))
        self._chunks = []

    def _plan(self) -> None:
        """Choose the chunks of the next step; all decode rows are in it."""
        preemptions = self.num_preemptions
        # what is planned ahead does not know yet that they have ended
        ended, ended_tokens = self._just_ended
        while self.used_tokens + len(self._rows) > self.model.arena_tokens:
            self._preempt()
        budget = self.model.max_num_batched_tokens - len(self._rows)
        for one in self._prefilling:
            count = chunk_tokens(one.computed, one.total, budget, not self._chunks)
            if count:
                self._chunks.append((one, count))
                budget -= count
        while (
            self._waiting
            and budget > 0
            and len(self._running) + ended < self.model.max_num_seqs
            and self.num_preemptions == preemptions
        ):
            one = self._waiting[0]
            count = chunk_tokens(0, one.total, budget, not self._chunks)
            held = self.model.unit_tokens + one.total
            # beside what the running ones will need next
            used = self.used_tokens + ended_tokens + len(self._running)
            if not count or used + held > self.model.arena_tokens:
                break
            self._waiting.popleft()
            self._running.append(one)
            self._prefilling.append(one)
            self.used_tokens += held
            self._chunks.append((one, count))
            budget -= count

    def _preempt(self) -> None:
        """The youngest gives its memory up, and is computed again later."""
        one = self._running[-1]
        assert len(self._running) > 1, "a request that fits the arena alone was preempted"
        self._remove(one)
        one.made, one.computed, one.decoding = one.reported, 0, False
        one.total = one.prompt_tokens + one.made
        one.epoch += 1
        self.num_preemptions += 1
        self._waiting.appendleft(one)

    def _remove(self, one: Sequence) -> None:
        self._running.remove(one)
        held = self.model.unit_tokens + one.total
        if one.decoding:
            del self._rows[one]
            made = one.made + self.num_steps - one.since
            self._context -= one.prompt_tokens + made
            # beyond what it held when it was let in
            held += made - (one.total - one.prompt_tokens) - 1
        else:
            self._prefilling.remove(one)
        self.used_tokens -= held
