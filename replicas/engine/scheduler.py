"""Which tokens of which requests a step computes, and what of the arena they need.

Owns the queues and the arena's use. Touches no tensor. There is no prefill phase and no decode phase: every
request's `num_computed_tokens` catches up with its tokens under one token budget.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.engine.plan import PENDING, SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.engine.preemption import Preemption, RecomputePreemption
from hybridserve.replicas.engine.request import Request, next_prompt_tokens

CHUNK_ALIGN = 64
"""Prefill chunks end on multiples of linear attention's chunk: a state there is bitwise a cold run's."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """First come, first served; the youngest running request gives way when the arena is full."""

    def __init__(self, arena: Arena, limits: SchedulerLimits, preemption: Preemption | None = None) -> None:
        self.arena = arena
        self.limits = limits
        self.num_preemptions = 0
        self._preemption = preemption or RecomputePreemption(arena)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Oldest first."""
        self._steps = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def awaits_results(self) -> bool:
        """Whether a running request cannot be planned for before the running step has ended."""
        return any(r.awaits_history for r in self._running)

    def uncomputed_tokens(self) -> int:
        """Tokens still to be computed, of waiting and running requests."""
        return sum(r.num_uncomputed for r in itertools.chain(self._running, self._waiting))

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request (finished or cancelled) and free what it holds."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.arena.release(request.unit_table, request.page_table)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute, or all wait for the running step.

        What is planned counts as computed from now on: plans run in order, and each is run.
        """
        scheduled: dict[Request, int] = {}
        preemptions = self.num_preemptions
        if self._schedule_decodes(scheduled):
            self._schedule_running_prefills(scheduled)
        if self.num_preemptions == preemptions:
            self._admit(scheduled)
        if not scheduled:
            ending = bool(self._running) and all(r.awaits_its_last_token for r in self._running)
            assert ending or not self.has_requests, "requests wait but none can be scheduled"
            return None
        # a last token with earlier context is fit for the recurrent form, whatever brought it here; one amid
        # a prompt is not, as the chunk after it would go on from a state that its ring completes
        rows = [r for r in scheduled if r.is_decode]
        # in the order of their states, so that a kernel finds neighbours side by side
        rows.sort(key=lambda r: r.unit_table)
        chunks = [r for r in scheduled if not r.is_decode]
        sequences = tuple(self._sequence(r, scheduled[r]) for r in rows + chunks)
        for at, (request, sequence) in enumerate(zip(rows + chunks, sequences, strict=True)):
            request.num_computed_tokens += len(sequence.token_ids)
            request.num_pending_tokens += sequence.sample is not None
            request.num_recurrent_tokens = request.num_recurrent_tokens + 1 if at < len(rows) else 0
        return StepPlan(next(self._steps), sequences, len(rows), self.arena.drain_copies())

    def _schedule_decodes(self, scheduled: dict[Request, int]) -> bool:
        """Returns whether there are running requests with more than one token to compute."""
        # by index: the list loses its tail when the youngest is preempted
        at = 0
        others = False
        budget, page_size = self.limits.max_num_batched_tokens, self.arena.layout.page.page_size
        while at < len(self._running) and len(scheduled) < budget:
            request = self._running[at]
            if not request.is_decode:
                others = True
            elif not request.awaits_its_last_token:
                # mostly its last page has room
                has_room = request.num_computed_tokens < len(request.page_table) * page_size
                if has_room or self._make_room(request, 1, scheduled):
                    scheduled[request] = 1
            at += 1
        return others or at < len(self._running)

    def _schedule_running_prefills(self, scheduled: dict[Request, int]) -> None:
        budget = self.limits.max_num_batched_tokens - len(scheduled)
        first = True
        at = 0
        while at < len(self._running) and budget > 0:
            request = self._running[at]
            at += 1
            if request.is_decode:
                continue
            count = self._chunk(request, budget, first)
            if count and self._make_room(request, count, scheduled):
                scheduled[request] = count
                budget -= count
                first = False

    def _admit(self, scheduled: dict[Request, int]) -> None:
        budget = self.limits.max_num_batched_tokens - sum(scheduled.values())
        first = all(r.is_decode for r in scheduled)
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting[0]
            count = self._chunk(request, budget, first)
            if not count or not self._has_room_for_all(request):
                break
            # whoever waits is younger than all that run, so the order of ages holds
            self._running.append(self._waiting.popleft())
            if not request.first_scheduled_time:
                request.first_scheduled_time = time.monotonic()
            allocated = self.arena.allocate_unit(request.unit_table) and self._grow(request, count)
            assert allocated, "the arena refused what it said would fit"
            scheduled[request] = count
            budget -= count
            first = False

    def _chunk(self, request: Request, budget: int, first: bool) -> int:
        """How many tokens to compute now; 0 to wait for a step with more budget left.

        A budget below CHUNK_ALIGN may reach no boundary: the step's first chunk is then cut anywhere, so that
        a small budget still moves on, and any other waits.
        """
        start, total = request.num_computed_tokens, request.num_tokens
        if total - start <= budget:
            return total - start
        if budget < CHUNK_ALIGN:
            return budget if first else 0
        return (start + budget) // CHUNK_ALIGN * CHUNK_ALIGN - start

    def _has_room_for_all(self, request: Request) -> bool:
        """Whether the arena holds a newcomer's known tokens beside what the running ones will need next."""
        layout = self.arena.layout
        growth = sum(layout.pages_for(r.num_tokens + 1) - len(r.page_table) for r in self._running)
        return self.arena.fits(1, layout.pages_for(request.num_tokens) + growth)

    def _grow(self, request: Request, count: int) -> bool:
        needed = self.arena.layout.pages_for(request.num_computed_tokens + count) - len(request.page_table)
        return needed <= 0 or self.arena.allocate_pages(needed, request.page_table)

    def _make_room(self, request: Request, count: int, scheduled: dict[Request, int]) -> bool:
        """Give a running request the pages for `count` more tokens; False when it had to give way itself."""
        while not self._grow(request, count):
            victim = self._running.pop()
            assert self._running, "a request that fits the arena alone was preempted"
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self._preemption.release(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(victim)

    def _sequence(self, request: Request, count: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        stop = start + count
        token_ids: Sequence[int] = request.token_ids[start:stop]
        if len(token_ids) < count:
            token_ids = [*token_ids, PENDING]
        sample = None
        if stop == request.num_tokens:
            params = request.params
            sample = SampleSpec(
                params,
                request.seed,
                stop,
                request.prompt_len,
                request.token_ids,
                request.banned_token_ids() if params.min_tokens else (),
            )
        wants = request.wants_prompt_logprobs
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=token_ids,
            context_len=start,
            unit=request.unit_table[0] if request.unit_table else -1,
            block_table=request.page_table,
            sample=sample,
            recurrent_tokens=request.num_recurrent_tokens,
            stagger=request.seed,
            prompt_logprobs=request.params.prompt_logprobs if wants else None,
            next_token_ids=next_prompt_tokens(request, start, stop) if wants else (),
        )
