"""What each rank of a replica says of itself, for all to read: that it lives, and how far it is.

A rank writes its own row alone. Knows nothing of what a step is.
"""

import struct
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from typing import Protocol

import torch.distributed as dist


class RankState(IntEnum):
    """In the order in which a rank passes them."""

    ABSENT = 0
    STARTING = 1
    SIZED = 2
    """`value` and `tag` are those of its memory."""
    READY = 3
    LEFT = 4
    """It goes, and nothing is wrong."""
    FAILED = 5


@dataclass(frozen=True)
class Row:
    """One rank's; every number is in [0, 2**32) and counters start over there."""

    beats: int = 0
    state: int = RankState.ABSENT
    value: int = 0
    tag: int = 0
    taken: int = 0
    """Steps that the rank has begun."""
    done: int = 0
    """Steps that it has ended."""


NUM_FIELDS = len(fields(Row))


class Board(Protocol):
    rank: int
    size: int

    def beat(self) -> None:
        """Count one more sign of life."""

    def report(self, state: RankState, value: int | None = None, tag: int | None = None) -> None:
        """Change the row; None leaves a number as it is."""

    def count(self, taken: int, done: int) -> None:
        """Others may see it as late as the next beat."""

    def row(self, rank: int) -> Row: ...


class MemoryBoard:
    """Rows in shared memory."""

    ROW_WORDS = 16
    """A cache line, so that ranks do not wait for each other's writes."""

    def __init__(self, words: memoryview, rank: int, size: int) -> None:
        """words: of format "I", zeroed when they were made, `size * ROW_WORDS` of them."""
        self._words, self.rank, self.size = words, rank, size
        self._at = rank * self.ROW_WORDS

    def beat(self) -> None:
        self._words[self._at] = (self._words[self._at] + 1) % 2**32

    def report(self, state: RankState, value: int | None = None, tag: int | None = None) -> None:
        for at, number in ((2, value), (3, tag), (1, state)):
            if number is not None:
                self._words[self._at + at] = number

    def count(self, taken: int, done: int) -> None:
        self._words[self._at + 4], self._words[self._at + 5] = taken % 2**32, done % 2**32

    def row(self, rank: int) -> Row:
        start = rank * self.ROW_WORDS
        return Row(*self._words[start : start + NUM_FIELDS])


class StoreBoard:
    """Rows in a store, for ranks on several hosts."""

    _FORMAT = f"<{NUM_FIELDS}I"

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._own = Row()
        self._lock = threading.Lock()
        """Beats come from a thread of their own."""

    def beat(self) -> None:
        with self._lock:
            self._write(beats=(self._own.beats + 1) % 2**32)

    def report(self, state: RankState, value: int | None = None, tag: int | None = None) -> None:
        told = {"state": state, "value": value, "tag": tag}
        with self._lock:
            self._write(**{name: number for name, number in told.items() if number is not None})

    def count(self, taken: int, done: int) -> None:
        # a message to the store for every step would cost more than it tells
        with self._lock:
            self._own = replace(self._own, taken=taken % 2**32, done=done % 2**32)

    def row(self, rank: int) -> Row:
        key = f"board/{rank}"
        return Row(*struct.unpack(self._FORMAT, self._store.get(key))) if self._store.check([key]) else Row()

    def _write(self, **changes: int) -> None:
        self._own = replace(self._own, **changes)
        self._store.set(f"board/{self.rank}", struct.pack(self._FORMAT, *astuple(self._own)))


def agree_on_least(board: Board, value: int, tag: int, wait: Callable[[Callable[[], bool]], None]) -> int:
    """The least of all ranks' `value`; called by every rank, once.

    wait: returns once what it is given is true, or raises.

    Raises:
        ValueError: a rank has another `tag` than rank 0.
    """
    if board.rank > 0:
        board.report(RankState.SIZED, value, tag)
        wait(lambda: board.row(0).state >= RankState.SIZED)
        return board.row(0).value
    others = range(1, board.size)
    wait(lambda: all(board.row(rank).state >= RankState.SIZED for rank in others))
    rows = [board.row(rank) for rank in others]
    for rank, row in zip(others, rows, strict=True):
        if row.tag != tag:
            raise ValueError(f"rank {rank} lays out its memory in another way than rank 0")
    least = min(value, *(row.value for row in rows))
    board.report(RankState.SIZED, least, tag)
    return least
