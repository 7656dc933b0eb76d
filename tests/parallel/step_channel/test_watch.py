"""Which rank is blamed, and when."""

import queue
import time
from dataclasses import replace

import pytest

from hybridserve.parallel.step_channel import watch
from hybridserve.parallel.step_channel.board import RankState, Row
from hybridserve.parallel.step_channel.watch import RankFailure, RankWatch, RootWatch

TICK_S = 0.01


class Board:
    """Rows as a test sets them; ranks in `alive` beat by themselves."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows = [Row(state=RankState.READY) for _ in range(size)]
        self.alive = set(range(1, size))
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1

    def report(self, state: RankState) -> None:
        self.rows[self.rank] = replace(self.rows[self.rank], state=state)

    def row(self, rank: int) -> Row:
        if rank in self.alive:
            self.rows[rank] = replace(self.rows[rank], beats=self.rows[rank].beats + 1)
        return self.rows[rank]


@pytest.fixture
def watched(monkeypatch):
    """(board, ends by rank, failures, watch) of three ranks, with ticks of ten milliseconds."""
    for name, value in (("TICK_S", TICK_S), ("SILENCE_S", 0.1), ("BEHIND_S", 0.2)):
        monkeypatch.setattr(watch, name, value)
    board, ends, failures = Board(3), {}, []
    one = RankWatch(3, ends.get, failures.append)
    one.attach(board)
    yield board, ends, failures, one
    one.stop()


def test_all_is_well(watched) -> None:
    board, _, failures, one = watched
    one.start()
    one.count_silence()
    time.sleep(0.3)
    one.check()
    assert failures == [] and one.failure is None and board.beats > 5


def test_the_killed_is_blamed_not_whom_it_drags_along(watched) -> None:
    board, ends, failures, one = watched
    ends[1] = (True, "failed: RuntimeError: connection closed")
    ends[2] = (False, "was killed by SIGKILL")
    one.start()
    failure = one.wait_for_failure(5.0)
    assert str(failure) == "rank 2 of 3 was killed by SIGKILL" and failures == [failure]
    with pytest.raises(RankFailure, match="rank 2 of 3"):
        one.check()
    assert board.rows[0].state == RankState.FAILED, "the others do not hear of it"


def test_a_silent_rank_is_blamed_once_all_are_ready(watched) -> None:
    board, _, _, one = watched
    board.alive.discard(2)
    one.start()
    time.sleep(0.3)
    assert one.failure is None, "it may still be loading"
    one.count_silence()
    assert str(one.wait_for_failure(5.0)) == "rank 2 of 3 has shown no sign of life for 0.1 s"


def test_a_rank_that_hangs_while_it_starts_is_blamed_later(watched, monkeypatch) -> None:
    monkeypatch.setattr(watch, "STARTING_SILENCE_S", 0.4)
    board, _, _, one = watched
    board.alive = set()
    board.rows[1], board.rows[2] = Row(), Row(state=RankState.STARTING)
    one.start()
    assert one.wait_for_failure(0.2) is None
    assert str(one.wait_for_failure(5.0)) == "rank 2 of 3 has shown no sign of life for 0.4 s"


def test_silence_while_it_started_is_not_held_against_a_ready_rank(watched, monkeypatch) -> None:
    monkeypatch.setattr(watch, "SILENCE_S", 0.4)
    board, _, failures, one = watched
    board.alive = {1}
    one.start()
    time.sleep(0.6)
    one.count_silence()
    time.sleep(0.05)
    board.alive = {1, 2}
    time.sleep(0.3)
    assert failures == []


@pytest.mark.parametrize("row", [{"taken": 4, "done": 4}, {"taken": 5, "done": 4}])
def test_a_rank_that_lives_and_does_not_move_is_blamed(watched, row) -> None:
    board, _, _, one = watched
    board.rows = [Row(state=RankState.READY, taken=5, done=5) for _ in range(3)]
    board.rows[1] = Row(state=RankState.READY, **row)
    one.count_silence()
    one.start()
    assert str(one.wait_for_failure(5.0)) == f"rank 1 of 3 has been stuck at step {row['taken']} for 0.2 s"


def test_ranks_may_be_ahead_of_a_caller_who_takes_time(watched) -> None:
    board, _, failures, one = watched
    board.rows = [Row(state=RankState.READY, taken=0, done=0) for _ in range(3)]
    board.rows[0] = Row(state=RankState.READY, taken=0, done=2**32 - 1)
    one.count_silence()
    one.start()
    time.sleep(0.4)
    assert failures == []


def test_a_rank_leaves_when_rank_0_is_gone_or_gives_up(monkeypatch) -> None:
    monkeypatch.setattr(watch, "TICK_S", TICK_S)
    monkeypatch.setattr(watch, "SILENCE_S", 0.05)
    gone, reasons = [], []
    for change in ("gone", "failed", "silent"):
        board = Board(2)
        board.rank, board.alive = 1, {0}
        gone.clear()
        one = RootWatch(lambda: bool(gone), reasons.append, longest_silence_s=0.2)
        one.attach(board)
        one.start()
        time.sleep(0.05)
        count = len(reasons)
        if change == "gone":
            gone.append(True)
        elif change == "failed":
            board.rows[0] = Row(state=RankState.FAILED)
        else:
            board.alive = set()
        time.sleep(0.5)
        assert len(reasons) == count + 1, change
        one.stop()
    assert reasons == [
        "rank 0 is gone",
        "rank 0 has given up the replica",
        "rank 0 has shown no sign of life for 0.2 s",
    ]


def test_a_rank_leaves_when_the_board_is_gone(monkeypatch) -> None:
    """Between hosts the board is a store in rank 0's process."""
    monkeypatch.setattr(watch, "TICK_S", TICK_S)
    board, reasons = Board(2), queue.Queue()

    def broken(rank: int) -> Row:
        raise RuntimeError("connection was closed")

    board.row = broken
    one = RootWatch(lambda: False, reasons.put)
    one.attach(board)
    one.start()
    assert reasons.get(timeout=10) == "rank 0's board is gone: connection was closed"
    one.stop()
