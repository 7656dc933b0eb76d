"""What one ingress knows of one pool's load, and the choice of a replica by it.

A replica's load is what it last reported plus what was sent to it since and is not in the report yet. The
ingress' event loop and Serve's router use this from two threads, so every method takes the lock.
"""

import random
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass

from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_sums import PoolSums
from hybridserve.cluster.routing.prefixes import PREFIX_TOKENS, LastReplicas
from hybridserve.cluster.routing.replica_account import ReplicaAccount

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
        self._accounts: dict[str | None, ReplicaAccount] = {None: ReplicaAccount()}
        """By replica; None: of requests that were not given to one yet."""
        self._reporting: dict[str, None] = {}
        """Replicas that have sent a report, in the order of their first."""
        self._names: list[str] | None = []
        """Of the replicas that there are, in order; None: to be put together."""
        self._bookings: dict[str, _Booking] = {}
        self._own_outstanding = 0
        """The sum of all accounts' own."""
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
            self._names = None
            self._failed &= self._replicas
            for silent in self._reporting.keys() - self._replicas:
                self._forget(silent)
            for changed in known ^ self._replicas:
                self._recount(changed, self._account(changed))
            # what was sent to those that are gone stays counted until it ends
            gone = self._accounts.keys() - self._replicas - {None}
            for name in [name for name in gone if self._accounts[name].empty]:
                del self._accounts[name]

    def observe(self, replica: str, load: ReplicaLoad) -> None:
        """A report has come from a replica."""
        with self._lock:
            account = self._accounts.get(replica) or self._account(replica)
            if account.report is None:
                self._reporting[replica] = None
                self._names = None
            account.observe(self._clock(), load)
            self._failed.discard(replica)
            self._recount(replica, account)

    def forget(self, replica: str) -> None:
        """No more reports will come from this connection."""
        with self._lock:
            self._forget(replica)

    def book(self, request_id: str, cost: Cost, prefix: int | None = None) -> None:
        """Count a request from now on; ids are unique among those that have not ended."""
        with self._lock:
            assert request_id not in self._bookings, request_id
            self._bookings[request_id] = _Booking(cost.tokens, cost.prompt_tokens, prefix)
            self._own_outstanding += cost.tokens
            self._accounts[None].send(cost.tokens, cost.prompt_tokens)

    def choose(self, candidates: Sequence[str], request_id: str | None) -> list[str]:
        """The candidates, the best first; a booked request counts as the best one's from now on.

        The best has the fewest outstanding tokens of a few taken at random, or has seen the prompt's
        beginning and has hardly more. Those that failed come last: they look idle, and are only when nothing
        has failed but a single call.
        """
        with self._lock:
            booking = self._bookings.get(request_id) if request_id is not None else None
            ranked = self._rank(candidates, self._sample(candidates))
            avoided = self._avoided(booking)
            if avoided:
                ranked.sort(key=avoided.__contains__)
            if booking is None or not ranked:
                return ranked
            best = self._hinted(booking, ranked[0], ranked) or ranked[0]
            if best != ranked[0]:
                ranked.remove(best)
                ranked.insert(0, best)
            self._give(booking, best)
            return ranked

    def pick(self, request_id: str) -> str | None:
        """The best of all replicas that there are, as with `choose`; None without one.

        Where there are thousands, ranking all the others takes `choose` longer than all else.
        """
        with self._lock:
            booking, names = self._bookings.get(request_id), self._in_order()
            if not names:
                return None
            avoided = self._avoided(booking)
            taken = self._sample(names)
            best = next((name for name in self._compare(names, taken) if name not in avoided), None)
            if best is None:
                best = min(self._rank(names, taken), key=avoided.__contains__)
            if booking is not None:
                best = self._hinted(booking, best, self._known()) or best
                self._give(booking, best)
            return best

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
            self._own_outstanding += remaining
            self._accounts[None].send(remaining, booking.prompt_tokens)
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
            return {name: report for name in self._reporting if (report := self._accounts[name].report)}

    def replicas(self) -> list[str]:
        """The ids of the replicas that there are."""
        with self._lock:
            return list(self._in_order())

    def outstanding(self, replica: str) -> int:
        """A replica's outstanding tokens, as estimated now."""
        with self._lock:
            return self._outstanding(replica)

    def totals(self) -> PoolTotals:
        with self._lock:
            sums, nowhere = self._sums, self._accounts[None]
            return PoolTotals(
                replicas=len(self._known()),
                own_requests=len(self._bookings),
                own_outstanding=self._own_outstanding,
                outstanding=sums.outstanding + nowhere.own,
                queued=sums.queued + nowhere.unseen_prompts,
                tokens_per_s=sums.tokens_per_s,
                queue_wait_s=sums.queue_wait_s,
            )

    def _sample(self, candidates: Sequence[str]) -> list[int]:
        # were all compared, ingresses with the same reports would all pick the same replica until the next
        return self._rng.sample(range(len(candidates)), min(_COMPARED, len(candidates)))

    def _compare(self, candidates: Sequence[str], taken: Sequence[int]) -> list[str]:
        return sorted((candidates[index] for index in taken), key=self._outstanding)

    def _rank(self, candidates: Sequence[str], taken: Sequence[int]) -> list[str]:
        others = list(candidates)
        for index in sorted(taken, reverse=True):
            del others[index]
        # for when none of them will do; a shuffle of thousands would take a millisecond
        first = self._rng.randrange(len(others)) if others else 0
        return self._compare(candidates, taken) + others[first:] + others[:first]

    def _avoided(self, booking: _Booking | None) -> Set[str]:
        return self._failed if booking is None else self._failed | booking.failed

    def _hinted(self, booking: _Booking, best: str, among: Container[str]) -> str | None:
        """The replica that saw the prompt's beginning, when it will do as well as the best."""
        hinted = self._last.get(booking.prefix)
        if hinted is None or hinted not in among or hinted in self._avoided(booking):
            return None
        # going elsewhere costs computing the prefix again: worth it only when that is what it saves
        if self._outstanding(hinted) > self._outstanding(best) + PREFIX_TOKENS:
            return None
        self.prefix_hits += 1
        return hinted

    def _known(self) -> Set[str]:
        # a replica that is being stopped still reports; before Serve says who there is, reports do
        return self._reporting.keys() if self._replicas is None else self._replicas

    def _in_order(self) -> list[str]:
        if self._names is None:
            self._names = sorted(self._known())
        return self._names

    def _account(self, replica: str | None) -> ReplicaAccount:
        account = self._accounts.get(replica)
        if account is None:
            account = self._accounts[replica] = ReplicaAccount()
        return account

    def _outstanding(self, replica: str) -> int:
        account = self._accounts.get(replica)
        return 0 if account is None else account.outstanding

    def _recount(self, replica: str | None, account: ReplicaAccount) -> None:
        """Something of a replica has changed."""
        if replica is not None:
            there = self._reporting if self._replicas is None else self._replicas
            self._sums.set(replica, account.share() if replica in there else None)

    def _give(self, booking: _Booking, replica: str) -> None:
        self._last.put(booking.prefix, replica)
        if booking.replica == replica:
            return
        old, new = self._account(booking.replica), self._account(replica)
        if booking.seen:
            old.own -= booking.remaining
            new.own += booking.remaining
        else:
            old.send(-booking.remaining, -booking.prompt_tokens)
            new.send(booking.remaining, booking.prompt_tokens)
        self._recount(booking.replica, old)
        self._recount(replica, new)
        booking.replica = replica

    def _see(self, booking: _Booking) -> None:
        if not booking.seen:
            booking.seen = True
            account = self._account(booking.replica)
            account.unseen -= booking.remaining
            account.unseen_prompts -= booking.prompt_tokens
            self._recount(booking.replica, account)

    def _shrink(self, booking: _Booking, tokens: int) -> None:
        booking.remaining -= tokens
        self._own_outstanding -= tokens
        account = self._account(booking.replica)
        account.own -= tokens
        if account.report is None:
            self._recount(booking.replica, account)

    def _forget(self, replica: str) -> None:
        self._reporting.pop(replica, None)
        self._names = None
        account = self._account(replica)
        account.forget()
        self._recount(replica, account)
