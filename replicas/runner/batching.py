"""From a StepPlan to the flat arrays of a forward pass, and from these to a batch on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from hybridserve.kernels.linear_attention.replay import replay_entries
from hybridserve.kernels.sampler import take_drawn
from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.engine.plan import PENDING, StepPlan
from hybridserve.replicas.models.batch import ReplayRows, StepBatch
from hybridserve.replicas.runner.block_tables import BlockTables
from hybridserve.replicas.runner.upload import upload

KNOWN = -1
"""In `StepArrays.sources`: the token is in `token_ids`."""


@dataclass(frozen=True)
class StepArrays:
    """A step's numbers on the host; fields that `StepBatch` has too are described there."""

    token_ids: np.ndarray
    """int64 [T], 0 where the token is pending."""
    sources: np.ndarray
    """int64 [T]: the row of the last step's draws that holds a pending token, else `KNOWN`."""
    positions: np.ndarray
    num_decodes: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    state_indices: np.ndarray
    tables: list[np.ndarray]
    """int64 [pages] of each sequence."""
    slot_mapping: np.ndarray
    logits_indices: np.ndarray
    replay_counts: np.ndarray
    """int64 [num_decodes]"""
    replay_flushes: np.ndarray
    """bool [num_decodes]"""

    @property
    def has_pending(self) -> bool:
        return bool((self.sources != KNOWN).any())


class Batcher:
    """Turns plans into arrays; remembers the page tables of the last one."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._tables = BlockTables()

    def arrays(self, plan: StepPlan, draw_rows: Mapping[str, int]) -> StepArrays:
        """Flatten a plan; logits are wanted of the last token of every sequence that samples.

        draw_rows: request id -> its row in the draws of the step before.
        """
        layout, sequences = self._layout, plan.sequences
        count = len(sequences)
        query_lens = tuple([len(s.token_ids) for s in sequences])
        context_lens = tuple([s.context_len for s in sequences])
        total = sum(query_lens)
        ends = np.cumsum(query_lens)
        if total == count:
            last = [s.token_ids[0] for s in sequences]
            token_ids = np.array(last, dtype=np.int64)
            positions = np.array(context_lens, dtype=np.int64)
        else:
            last = [s.token_ids[-1] for s in sequences]
            token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, total)
            lens = np.array(query_lens)
            positions = np.arange(total) + np.repeat(np.array(context_lens) - (ends - lens), lens)
        sources = np.full(total, KNOWN)
        for at, token_id in enumerate(last):
            if token_id == PENDING:
                end = ends[at] - 1
                sources[end] = draw_rows[sequences[at].request_id]
                token_ids[end] = 0
        tables = self._tables.rows(sequences, bool(plan.copies.pages))
        rows = sequences[: plan.num_decodes]
        window = layout.unit.replay_window
        counts, flushes = replay_entries(
            np.asarray([s.recurrent_tokens for s in rows], dtype=np.int64),
            np.asarray([s.stagger % max(window, 1) for s in rows], dtype=np.int64),
            max(window, 1),
        )
        return StepArrays(
            token_ids=token_ids,
            sources=sources,
            positions=positions,
            num_decodes=plan.num_decodes,
            query_lens=query_lens,
            context_lens=context_lens,
            state_indices=np.asarray([layout.state_index(s.unit) for s in sequences], dtype=np.int64),
            tables=tables,
            slot_mapping=self._slots(tables, positions, query_lens),
            logits_indices=np.asarray(
                [end - 1 for s, end in zip(sequences, ends, strict=True) if s.sample is not None],
                dtype=np.int64,
            ),
            replay_counts=counts,
            replay_flushes=flushes,
        )

    def _slots(
        self, tables: Sequence[np.ndarray], positions: np.ndarray, query_lens: Sequence[int]
    ) -> np.ndarray:
        """Where each token's K goes, counted in tokens of one slab from the arena's start."""
        page = self._layout.page
        if not page.nbytes:
            return np.zeros(0, dtype=np.int64)
        numbers, offsets = np.divmod(positions, page.page_size)
        if len(tables) == len(positions):
            pages = numbers.tolist()
            entries = np.array([t[n] for t, n in zip(tables, pages, strict=True)], dtype=np.int64)
        else:
            parts = np.split(numbers, np.cumsum(query_lens)[:-1])
            entries = np.concatenate([t[n] for t, n in zip(tables, parts, strict=True)])
        return entries * page.page_size + offsets


def build_batch(
    arrays: StepArrays, drawn: torch.Tensor | None, window: int, device: torch.device
) -> StepBatch:
    """The batch on the device; `drawn`, int64 [rows], holds what the last step drew for pending tokens."""
    width = max(len(table) for table in arrays.tables)
    tables = np.zeros((len(arrays.tables), width), dtype=np.int32 if device.type == "cuda" else np.int64)
    for row, table in zip(tables, arrays.tables, strict=True):
        row[: len(table)] = table
    has_initial_state = np.asarray(arrays.context_lens) > 0
    token_ids, sources, positions, known, states, tables, slots, wanted, counts, flushes = upload(
        [
            arrays.token_ids,
            arrays.sources,
            arrays.positions,
            has_initial_state,
            arrays.state_indices,
            tables,
            arrays.slot_mapping,
            arrays.logits_indices,
            arrays.replay_counts,
            arrays.replay_flushes,
        ],
        device,
    )
    if arrays.has_pending:
        assert drawn is not None
        token_ids = take_drawn(token_ids, drawn, sources)
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        num_decodes=arrays.num_decodes,
        query_lens=arrays.query_lens,
        context_lens=arrays.context_lens,
        has_initial_state=known,
        state_indices=states,
        block_tables=tables,
        slot_mapping=slots,
        logits_indices=wanted,
        replay=ReplayRows(counts, flushes) if window else None,
    )
