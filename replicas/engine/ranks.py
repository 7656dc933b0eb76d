"""The ranks of a replica as its rank 0, this process, sees them: starting, meeting, watching, ending others.

How a process is started, and how its end is known, is `RankProcesses`': processes of this machine in
`local_ranks`, actors in the cluster room. What the others do is in `rank`.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hybridserve.parallel.group import SINGLE, connect
from hybridserve.parallel.rendezvous import host_store, poll_until
from hybridserve.parallel.step_channel.board import RankState
from hybridserve.parallel.step_channel.channel import StepChannel
from hybridserve.parallel.step_channel.opening import open_channel
from hybridserve.parallel.step_channel.watch import RankFailure, RankWatch
from hybridserve.replicas.engine.config import EngineConfig

END = b"end"
"""The message after the last plan; no plan begins like it."""
END_S = 3.0
"""How long ranks may take to end by themselves."""


@dataclass(frozen=True)
class RankStart:
    """What a rank above 0 is told; filled by rank 0."""

    rank: int
    device_index: int
    """Of its GPU, among those that its process sees."""
    config: EngineConfig
    address: str
    """Of the store on which the ranks meet, in rank 0's process."""
    port: int


class RankProcesses(Protocol):
    """The processes of ranks 1 … size-1, which this one starts and ends."""

    address: str
    """Of this machine, by which all ranks reach it."""

    def device_index(self, rank: int) -> int:
        """Of the rank's GPU, among those that its process sees."""

    def start(self, start: RankStart) -> None:
        """Make a process be that rank; returns at once."""

    def end_of(self, rank: int) -> str | None:
        """How the process ended, in words that follow "rank 1 of 2 "; None while it runs. Returns at once."""

    def wait(self, timeout_s: float) -> None:
        """Return when all have ended, or the time has passed."""

    def kill(self) -> None:
        """End all that have not ended. May be called again."""


def failure_key(rank: int) -> str:
    """Where on the store a rank leaves the reason of its end."""
    return f"failure/{rank}"


class Ranks:
    """Ranks 1 … size-1, and what this process, rank 0, shares with them.

    Not for use after `stop`.
    """

    def __init__(
        self, config: EngineConfig, backend: str, processes: RankProcesses, overlapped_bytes: int = 0
    ) -> None:
        """Start the processes and meet them; overlapped_bytes: as in `connect`.

        Raises:
            RankFailure: one of them has failed; names it and says why.
        """
        self.size = config.tensor_parallel_size
        self.group = SINGLE
        self.channel: StepChannel | None = None
        self._is_stopped = False
        self._pid = os.getpid()
        self._processes = processes
        address = processes.address
        self._store = host_store(address)
        self.watch = RankWatch(self.size, self._end_of, self._give_up)
        try:
            for rank in range(1, self.size):
                index = processes.device_index(rank)
                processes.start(RankStart(rank, index, config, address, self._store.port))
            self.watch.start()
            self.channel = open_channel(self._store, 0, self.size, self.watch.check, address)
            self.watch.attach(self.channel.board)
            self.group = connect(
                0,
                self.size,
                self._store,
                backend=backend,
                address=address,
                overlapped_bytes=overlapped_bytes,
            )
        except BaseException:
            self.stop(0.0)
            raise

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once `done()` is true; raises RankFailure when a rank fails meanwhile."""
        poll_until(done, self.watch.check)

    def finish_start(self) -> None:
        """Wait until all are ready; from now on they have to be on time."""
        board = self.channel.board
        board.report(RankState.READY)
        self.wait(lambda: all(board.row(rank).state == RankState.READY for rank in range(1, self.size)))
        self.watch.count_silence()

    def stop(self, patience_s: float = END_S) -> None:
        """End the processes, killing those that have not ended after `patience_s`; after the first call
        nothing happens."""
        # a fork of this process has no ranks of its own
        if self._is_stopped or os.getpid() != self._pid:
            return
        self._is_stopped = True
        # before the end of a rank could be taken for a failure
        self.watch.stop()
        if self.watch.failure is None and self.channel is not None and patience_s > 0:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.channel.send(END)
                self._processes.wait(patience_s)
        self._processes.kill()
        if patience_s <= 0:
            # a step that they had a part in may be waiting for them
            self.group.abort()
        if self.channel is not None:
            self.channel.close()

    def _give_up(self, failure: RankFailure) -> None:
        """A rank has failed: the others are of no use, and their end ends what this process waits for."""
        self._processes.kill()
        self.group.abort()

    def _end_of(self, rank: int) -> tuple[bool, str] | None:
        how = self._processes.end_of(rank)
        if how is None:
            return None
        key = failure_key(rank)
        if self._store.check([key]):
            return True, f"failed: {self._store.get(key).decode()}"
        return False, how
