"""Sums over a pool's replicas, kept up to date by one replica's change at a time.

A request asks for them at its admission, and a pool may have thousands of replicas.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """What one replica adds."""

    outstanding: int
    queued: int
    tokens_per_s: float | None
    """None before anything was measured."""
    starts_per_s: float | None
    """Prompts' tokens a second while there is a queue; None or 0 when that is not known."""

    @property
    def wait_s(self) -> float | None:
        """Until a new request's turn; None while the queue's pace is not known."""
        if not self.queued:
            return 0.0
        return self.queued / self.starts_per_s if self.starts_per_s else None


class PoolSums:
    """Sums of the shares of the replicas that there are."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.queued = 0
        self._shares: dict[str, ReplicaShare] = {}
        self._tokens_per_s = 0.0
        self._measured = 0
        self._idle = 0
        """Replicas without a queue."""
        self._unknown = 0
        """Those whose queue's pace is not known."""

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything was measured."""
        return self._tokens_per_s if self._measured else None

    @property
    def queue_wait_s(self) -> float | None:
        """Until a new request's turn at the replica where it comes first; None while that is not known."""
        if self._unknown or not self._shares:
            return None
        if self._idle:
            return 0.0
        return min(share.wait_s or 0.0 for share in self._shares.values())

    def set(self, replica: str, share: ReplicaShare | None) -> None:
        """A replica's share from now on; None: there is no such replica."""
        old = self._shares.get(replica)
        if old == share:
            return
        if old is not None:
            self._add(old, -1)
            del self._shares[replica]
        if share is not None:
            self._add(share, 1)
            self._shares[replica] = share

    def _add(self, share: ReplicaShare, sign: int) -> None:
        self.outstanding += sign * share.outstanding
        self.queued += sign * share.queued
        if share.tokens_per_s is not None:
            self._measured += sign
            self._tokens_per_s += sign * share.tokens_per_s
        wait = share.wait_s
        self._idle += sign * (wait == 0.0)
        self._unknown += sign * (wait is None)
