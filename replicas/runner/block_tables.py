"""The running sequences' page tables as arrays, which grow with them instead of being built each step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridserve.replicas.engine.plan import ScheduledSequence

INITIAL_PAGES = 64


@dataclass(slots=True)
class _Row:
    table: Sequence[int]
    """The request's own list, which tells one request from another that took its id."""
    pages: np.ndarray
    length: int


class BlockTables:
    """One array a sequence, int64, as long as the step before scheduled it too."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def rows(self, sequences: Sequence[ScheduledSequence], moved: bool) -> list[np.ndarray]:
        """The page entries of each sequence, to be read before the next call.

        moved: pages of any sequence were moved since the last call, so that no old entry counts.
        """
        old = {} if moved else self._rows
        self._rows = {s.request_id: self._row(s, old.get(s.request_id)) for s in sequences}
        return [row.pages[: row.length] for row in self._rows.values()]

    def _row(self, sequence: ScheduledSequence, row: _Row | None) -> _Row:
        table = sequence.block_table
        length = len(table)
        # a sequence that starts over has other pages, in the same list
        if row is None or row.table is not table or sequence.context_len == 0 or row.length > length:
            pages = np.empty(max(INITIAL_PAGES, 2 * length), dtype=np.int64)
            pages[:length] = table
            return _Row(table, pages, length)
        if length > row.pages.shape[0]:
            row.pages = np.concatenate([row.pages[: row.length], np.empty(length, dtype=np.int64)])
        row.pages[row.length : length] = table[row.length :]
        row.length = length
        return row
