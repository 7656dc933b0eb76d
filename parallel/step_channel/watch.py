"""Noticing within seconds that a rank of a replica is dead or stuck, and saying which.

A thread in every rank's process writes signs of life to the board. Rank 0's reads those of all others, the
others' read rank 0's. Time is counted in ticks of the watching thread: when this process itself stood still,
the others' silence meanwhile means nothing.
"""

import logging
import threading
from collections.abc import Callable

from hybridserve.parallel.step_channel.board import Board, RankState, Row

logger = logging.getLogger(__name__)

TICK_S = 0.2
SILENCE_S = 4.0
"""Without a sign of life a process is stopped, or its host is gone."""
STARTING_SILENCE_S = 60.0
"""As long as not all are ready: one call that lets no other thread run may take seconds then."""
BEHIND_S = 10.0
"""A rank that lives but does not take a step, or does not end one that rank 0 has ended."""


class RankFailure(RuntimeError):
    """A rank of the replica is dead or stuck, and so is the replica."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {size} {reason}")
        self.rank = rank
        self._said = rank, size, reason

    def again(self) -> "RankFailure":
        """The same without a traceback, which would keep alive whatever ran when it was raised."""
        return RankFailure(*self._said)


class RankWatch:
    """Rank 0's."""

    def __init__(
        self,
        size: int,
        end_of: Callable[[int], tuple[bool, str] | None],
        on_failure: Callable[[RankFailure], None],
    ) -> None:
        """end_of: how a rank's process ended, if it is known to have: whether the rank gave a reason itself,
        and the words that follow "rank 1 of 2 " in the error. on_failure: called once, on the thread.
        """
        self._size, self._end_of, self._on_failure = size, end_of, on_failure
        self._board: Board | None = None
        self._counts_silence = False
        self._quiet = _Quiet(size)
        self._stopped = threading.Event()
        self._failed = threading.Event()
        self.failure: RankFailure | None = None
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    def start(self) -> None:
        """From now on ends of processes are noticed."""
        self._thread.start()

    def attach(self, board: Board) -> None:
        """From now on rank 0 shows signs of life."""
        self._board = board

    def count_silence(self) -> None:
        """From now on the others have to be on time: they are all ready. Until then only a much longer
        silence counts."""
        # what was silent while it started has not been silent since
        self._quiet = _Quiet(self._size)
        self._counts_silence = True

    def stop(self) -> None:
        """Watch no longer; waits until the board is not used any more."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure.again()

    def wait_for_failure(self, timeout_s: float) -> RankFailure | None:
        """What is behind an error that a lost connection has caused here."""
        self._failed.wait(timeout_s)
        return self.failure

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            if self._board is not None:
                self._board.beat()
            if self._find() is None:
                continue
            # whom a failure drags along may be seen first: look again when all of it is there
            if self._stopped.wait(TICK_S):
                return
            rank, reason = self._find() or (0, "")
            self.failure = RankFailure(rank, self._size, reason)
            logger.error("%s", self.failure)
            if self._board is not None:
                self._board.report(RankState.FAILED)
            try:
                self._on_failure(self.failure)
            finally:
                self._failed.set()
            return

    def _find(self) -> tuple[int, str] | None:
        """The rank to blame, and for what."""
        ended = {rank: end for rank in range(1, self._size) if (end := self._end_of(rank)) is not None}
        # whoever could not say why was killed; a reason may only be that a connection to that one broke
        for said_why in (False, True):
            for rank, (said, reason) in ended.items():
                if said is said_why:
                    return rank, reason
        if self._board is None:
            return None
        rows = {rank: self._board.row(rank) for rank in range(self._size)}
        for rank in range(1, self._size):
            if rows[rank].state in (RankState.LEFT, RankState.FAILED):
                return rank, "has left"
        # first this: with it comes a new count
        are_ready = self._counts_silence
        return self._quiet.find(rows, are_ready)


class _Quiet:
    """For how many ticks ranks have not moved."""

    def __init__(self, size: int) -> None:
        self._last = [Row()] * size
        self._silent = [0] * size
        self._behind = [0] * size

    def find(self, rows: dict[int, Row], are_ready: bool) -> tuple[int, str] | None:
        root, found = rows[0], None
        limit = SILENCE_S if are_ready else STARTING_SILENCE_S
        for rank in range(1, len(rows)):
            row, last = rows[rank], self._last[rank]
            self._last[rank] = row
            # one that has not come to the board yet still loads its libraries
            is_silent = row.beats == last.beats and row.state != RankState.ABSENT
            self._silent[rank] = self._silent[rank] + 1 if is_silent else 0
            is_behind = _is_less(row.done, root.done) or _is_less(row.taken, root.taken)
            moves = (row.taken, row.done) != (last.taken, last.done)
            self._behind[rank] = self._behind[rank] + 1 if is_behind and not moves else 0
            if self._silent[rank] * TICK_S >= limit:
                return rank, f"has shown no sign of life for {limit:g} s"
            if are_ready and self._behind[rank] * TICK_S >= BEHIND_S and found is None:
                found = rank, f"has been stuck at step {row.taken} for {BEHIND_S:g} s"
        return found


def _is_less(a: int, b: int) -> bool:
    """Of two counters that start over at 2**32 and are near each other."""
    return 0 < (b - a) % 2**32 < 2**31


class RootWatch:
    """Another rank's: its process must not outlive rank 0's."""

    def __init__(
        self,
        root_is_gone: Callable[[], bool],
        on_gone: Callable[[str], None],
        longest_silence_s: float | None = None,
    ) -> None:
        """root_is_gone: whether rank 0's process is known to have ended. on_gone: called on the thread with
        the reason. longest_silence_s: how long rank 0 may show no sign of life; None where `root_is_gone`
        knows, as it may be busy in code that lets no other thread run, or be in a debugger.
        """
        self._root_is_gone, self._on_gone = root_is_gone, on_gone
        self._longest_silence_s = longest_silence_s
        self._board: Board | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="root watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def attach(self, board: Board) -> None:
        """From now on this rank shows signs of life."""
        self._board = board

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        last, silent = 0, 0
        while not self._stopped.wait(TICK_S):
            if self._root_is_gone():
                self._on_gone("rank 0 is gone")
                return
            if self._board is None:
                continue
            try:
                self._board.beat()
                root = self._board.row(0)
            except RuntimeError as error:
                # between hosts the board is a store in rank 0's process
                self._on_gone(f"rank 0's board is gone: {error}")
                return
            if root.state == RankState.FAILED:
                self._on_gone("rank 0 has given up the replica")
                return
            silent = silent + 1 if root.beats == last else 0
            last = root.beats
            if silent == round(SILENCE_S / TICK_S):
                logger.warning("rank 0 has shown no sign of life for %g s", SILENCE_S)
            limit = self._longest_silence_s
            if limit is not None and silent * TICK_S >= limit:
                self._on_gone(f"rank 0 has shown no sign of life for {limit:g} s")
                return
