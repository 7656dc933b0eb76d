"""Sums over a pool's replicas, kept up to date by one replica's change at a time.

A request asks for them at its admission, and a pool may have thousands of replicas.
"""

from typing import NamedTuple


# no dataclass: one is made with every report, in a third of the time that a frozen one takes
class ReplicaShare(NamedTuple):
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


_NOTHING = ReplicaShare(0, 0, None, None)


class PoolSums:
    """Sums of the shares of the replicas that there are."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.queued = 0
        self._shares: dict[str, ReplicaShare] = {}
        self._tokens_per_s = 0.0
        self._measured = 0
        self._queueing = 0
        """Replicas with a queue."""
        self._unknown = 0
        """Those whose queue's pace is not known."""
        self._least: tuple[float, str] | None = None
        """The least wait of a queue, and whose it is; None: to be looked for."""

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything was measured."""
        return self._tokens_per_s if self._measured else None

    @property
    def queue_wait_s(self) -> float | None:
        """Until a new request's turn at the replica where it comes first; None while that is not known."""
        if self._unknown or not self._shares:
            return None
        if self._queueing < len(self._shares):
            return 0.0
        if self._least is None:
            self._least = min((share.wait_s or 0.0, name) for name, share in self._shares.items())
        return self._least[0]

    def set(self, replica: str, share: ReplicaShare | None) -> None:
        """A replica's share from now on; None: there is no such replica."""
        old = self._shares.get(replica)
        if old == share:
            return
        if share is None:
            del self._shares[replica]
        else:
            self._shares[replica] = share
        self._change(replica, old or _NOTHING, share or _NOTHING)

    def _change(self, replica: str, old: ReplicaShare, new: ReplicaShare) -> None:
        self.outstanding += new.outstanding - old.outstanding
        self.queued += new.queued - old.queued
        if new.tokens_per_s != old.tokens_per_s:
            self._measured += (new.tokens_per_s is not None) - (old.tokens_per_s is not None)
            self._tokens_per_s += (new.tokens_per_s or 0.0) - (old.tokens_per_s or 0.0)
        if new.queued or old.queued:
            wait = new.wait_s
            self._queueing += (new.queued > 0) - (old.queued > 0)
            self._unknown += (wait is None) - (old.wait_s is None)
            self._keep_least(replica, wait if new.queued else None)

    def _keep_least(self, replica: str, wait: float | None) -> None:
        """After a change of this replica's wait; None: it has none, or it is not known."""
        if self._least is None:
            return
        if wait is not None and wait <= self._least[0]:
            self._least = wait, replica
        elif self._least[1] == replica:
            self._least = None
