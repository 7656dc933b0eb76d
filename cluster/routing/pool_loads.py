"""What one ingress knows of one pool's load, and the choice of a replica by it.

A replica's load is what it last reported plus what was sent to it since and is not in the report yet. The
ingress' event loop and Serve's router use this from two threads, so every method takes the lock.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_sums import PoolSums, ReplicaShare
from hybridserve.cluster.routing.prefixes import PREFIX_TOKENS, LastReplicas
from hybridserve.cluster.routing.rates import TokenRate

# replicas that a choice looks at; measured in tests/cluster/routing/test_herding.py
_COMPARED = 4


@dataclass
class _Booking:
    """A request of this ingress that has not ended."""

    remaining: int
    prompt_tokens: int
    prefix: int | None
    replica: str | None = None
    seen: bool = False
    """The replica's reports count it."""
    started: bool = False
    failed: frozenset[str] = frozenset()
    """Replicas that failed it."""


@dataclass(frozen=True)
class PoolTotals:
    """The pool as admission sees it, all in tokens unless said otherwise."""

    replicas: int
    own_requests: int
    """Requests of this ingress that have not ended."""
    own_outstanding: int
    outstanding: int
    """Of all ingress replicas, as far as reports have come."""
    queued: int
    """Of prompts without a first token."""
    tokens_per_s: float | None
    """Of all kinds, all replicas together; None before anything was measured."""
    queue_wait_s: float | None
    """Until a new request's turn at the replica where it comes first; None while that is not known."""


class PoolLoads:
    """The loads of one pool's replicas.

    Args:
        rng: breaks ties, so that several ingresses do not all pick the same replica.
        clock: seconds that only grow.
    """

    def __init__(self, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rng = rng or random.Random()
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: frozenset[str] | None = None
        self._reports: dict[str, ReplicaLoad] = {}
        self._rates: dict[str, TokenRate] = {}
        self._starts: dict[str, TokenRate] = {}
        """Prompts' tokens while there is a queue. What limits them, room in the batch or computing, may be
        another thing in the next queue."""
        self._bookings: dict[str, _Booking] = {}
        self._own: Counter[str | None] = Counter()
        """Remaining tokens of this ingress' requests by replica; None: not given to one yet."""
        self._unseen: Counter[str | None] = Counter()
        """The part of `_own` that no report counts yet."""
        self._unseen_prompts: Counter[str | None] = Counter()
        """And of that, the prompts."""
        self._own_outstanding = 0
        """The sum of `_own`."""
        self._sums = PoolSums()
        self._last = LastReplicas()
        self._failed: set[str] = set()
        """Replicas that failed a request and have not been heard of since."""
        self.prefix_hits = 0

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """The replicas that there are; others' reports count no more."""
        with self._lock:
            known = frozenset(self._known())
            self._replicas = frozenset(replicas)
            self._failed &= self._replicas
            for gone in self._reports.keys() - self._replicas:
                self._forget(gone)
            # what was sent to those that are gone stays counted until it ends
            self._own += Counter()
            self._unseen += Counter()
            self._unseen_prompts += Counter()
            for changed in known ^ self._replicas:
                self._recount(changed)

    def observe(self, replica: str, load: ReplicaLoad) -> None:
        """A report has come from a replica."""
        with self._lock:
            self._reports[replica] = load
            self._failed.discard(replica)
            if replica not in self._rates:
                self._rates[replica] = TokenRate()
                self._starts[replica] = TokenRate(forgets=True)
            now = self._clock()
            self._rates[replica].observe(now, load.progressed_tokens, load.outstanding_tokens > 0)
            self._starts[replica].observe(now, load.started_tokens, load.queued_tokens > 0)
            self._recount(replica)

    def forget(self, replica: str) -> None:
        """No more reports will come from this connection."""
        with self._lock:
            self._forget(replica)

    def book(self, request_id: str, cost: Cost, prefix: int | None = None) -> None:
        """Count a request from now on; ids are unique among those that have not ended."""
        with self._lock:
            assert request_id not in self._bookings, request_id
            self._bookings[request_id] = _Booking(cost.tokens, cost.prompt_tokens, prefix)
            self._own[None] += cost.tokens
            self._own_outstanding += cost.tokens
            self._unseen[None] += cost.tokens
            self._unseen_prompts[None] += cost.prompt_tokens

    def choose(self, candidates: Sequence[str], request_id: str | None) -> list[str]:
        """The candidates, the best first; a booked request counts as the best one's from now on.

        The best has the fewest outstanding tokens of a few taken at random, or has seen the prompt's
        beginning and has hardly more. Those that failed come last: they look idle, and are only when nothing
        has failed but a single call.
        """
        with self._lock:
            booking = self._bookings.get(request_id) if request_id is not None else None
            avoided = self._failed if booking is None else self._failed | booking.failed
            ranked = self._rank(candidates)
            if avoided:
                ranked.sort(key=avoided.__contains__)
            if booking is None or not ranked:
                return ranked
            hinted = self._last.get(booking.prefix)
            # going elsewhere costs computing the prefix again: worth it only when that is what it saves
            known = hinted is not None and hinted in ranked and hinted not in avoided
            if known and self._outstanding(hinted) <= self._outstanding(ranked[0]) + PREFIX_TOKENS:
                self.prefix_hits += 1
                ranked.remove(hinted)
                ranked.insert(0, hinted)
            self._give(booking, ranked[0])
            return ranked

    def routed(self, request_id: str, replica: str) -> None:
        """The request went to this replica, whatever was chosen before."""
        with self._lock:
            booking = self._bookings.get(request_id)
            if booking is not None:
                self._give(booking, replica)

    def accepted(self, request_id: str) -> None:
        """The replica's last report counts the request."""
        with self._lock:
            booking = self._bookings.get(request_id)
            if booking is not None:
                self._see(booking)

    def failed(self, request_id: str) -> str | None:
        """The request's replica has failed it: it counts as not sent yet, its prompt as not computed.

        Returns the replica, None when the request was not given to one or is not known.
        """
        with self._lock:
            booking = self._bookings.get(request_id)
            if booking is None or booking.replica is None:
                return None
            replica = booking.replica
            self._failed.add(replica)
            remaining = booking.remaining + booking.prompt_tokens * booking.started
            self._see(booking)
            self._shrink(booking, booking.remaining)
            failed = booking.failed | {replica}
            self._bookings[request_id] = _Booking(
                remaining, booking.prompt_tokens, booking.prefix, failed=failed
            )
            self._own[None] += remaining
            self._own_outstanding += remaining
            self._unseen[None] += remaining
            self._unseen_prompts[None] += booking.prompt_tokens
            return replica

    def progress(self, request_id: str, tokens: int) -> None:
        """`tokens` more of the answer have come; the first say that the prompt is computed."""
        if tokens == 0:
            return
        with self._lock:
            booking = self._bookings.get(request_id)
            if booking is not None:
                # where tokens come without reports, they are what shows that it runs
                self._see(booking)
                done = tokens if booking.started else tokens + booking.prompt_tokens
                booking.started = True
                self._shrink(booking, min(done, booking.remaining))

    def end(self, request_id: str) -> None:
        """The request is over; an unknown one is no error."""
        with self._lock:
            booking = self._bookings.pop(request_id, None)
            if booking is not None:
                self._see(booking)
                self._shrink(booking, booking.remaining)

    def replica_of(self, request_id: str) -> str | None:
        """The replica that a request was given to; None while it waits for one, and after its end."""
        with self._lock:
            booking = self._bookings.get(request_id)
            return None if booking is None else booking.replica

    def reports(self) -> dict[str, ReplicaLoad]:
        """The last report of every replica that has sent one."""
        with self._lock:
            return dict(self._reports)

    def replicas(self) -> list[str]:
        """The ids of the replicas that there are."""
        with self._lock:
            return sorted(self._known())

    def outstanding(self, replica: str) -> int:
        """A replica's outstanding tokens, as estimated now."""
        with self._lock:
            return self._outstanding(replica)

    def totals(self) -> PoolTotals:
        with self._lock:
            sums = self._sums
            return PoolTotals(
                replicas=len(self._known()),
                own_requests=len(self._bookings),
                own_outstanding=self._own_outstanding,
                outstanding=sums.outstanding + self._own[None],
                queued=sums.queued + self._unseen_prompts[None],
                tokens_per_s=sums.tokens_per_s,
                queue_wait_s=sums.queue_wait_s,
            )

    def _rank(self, candidates: Sequence[str]) -> list[str]:
        # were all compared, ingresses with the same reports would all pick the same replica until the next
        taken = self._rng.sample(range(len(candidates)), min(_COMPARED, len(candidates)))
        compared = sorted((candidates[index] for index in taken), key=self._outstanding)
        others = list(candidates)
        for index in sorted(taken, reverse=True):
            del others[index]
        # for when none of them will do; a shuffle of thousands would take a millisecond
        first = self._rng.randrange(len(others)) if others else 0
        return compared + others[first:] + others[:first]

    def _known(self) -> Set[str]:
        # a replica that is being stopped still reports; before Serve says who there is, reports do
        return self._reports.keys() if self._replicas is None else self._replicas

    def _outstanding(self, replica: str) -> int:
        report = self._reports.get(replica)
        if report is None:
            # without reports an ingress knows at least what it has sent itself
            return self._own[replica]
        return report.outstanding_tokens + self._unseen[replica]

    def _queued(self, replica: str) -> int:
        report = self._reports.get(replica)
        return self._unseen_prompts[replica] + (0 if report is None else report.queued_tokens)

    def _share(self, replica: str) -> ReplicaShare:
        rate, starts = self._rates.get(replica), self._starts.get(replica)
        return ReplicaShare(
            self._outstanding(replica),
            self._queued(replica),
            None if rate is None else rate.tokens_per_s,
            # prompts get their first token in turn, at the pace at which they just did
            None if starts is None else starts.tokens_per_s,
        )

    def _recount(self, replica: str | None) -> None:
        """Something of a replica has changed."""
        if replica is not None:
            self._sums.set(replica, self._share(replica) if replica in self._known() else None)

    def _give(self, booking: _Booking, replica: str) -> None:
        self._last.put(booking.prefix, replica)
        if booking.replica == replica:
            return
        for counter in (self._own,) if booking.seen else (self._own, self._unseen):
            counter[booking.replica] -= booking.remaining
            counter[replica] += booking.remaining
        if not booking.seen:
            self._unseen_prompts[booking.replica] -= booking.prompt_tokens
            self._unseen_prompts[replica] += booking.prompt_tokens
        self._recount(booking.replica)
        self._recount(replica)
        booking.replica = replica

    def _see(self, booking: _Booking) -> None:
        if not booking.seen:
            booking.seen = True
            self._unseen[booking.replica] -= booking.remaining
            self._unseen_prompts[booking.replica] -= booking.prompt_tokens
            self._recount(booking.replica)

    def _shrink(self, booking: _Booking, tokens: int) -> None:
        booking.remaining -= tokens
        self._own[booking.replica] -= tokens
        self._own_outstanding -= tokens
        if booking.replica not in self._reports:
            self._recount(booking.replica)

    def _forget(self, replica: str) -> None:
        self._reports.pop(replica, None)
        self._rates.pop(replica, None)
        self._starts.pop(replica, None)
        self._recount(replica)
