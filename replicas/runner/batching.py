"""From a StepPlan to the flat tensors of a forward pass."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.engine.plan import ScheduledSequence, StepPlan
from hybridserve.replicas.models.batch import StepBatch


def build_batch(plan: StepPlan, layout: ArenaLayout, device: torch.device) -> StepBatch:
    """Flatten a plan; logits are wanted of the last token of every sequence that samples."""
    sequences = plan.sequences
    query_lens = tuple(len(s.token_ids) for s in sequences)
    context_lens = tuple(s.context_len for s in sequences)
    ends = np.cumsum(query_lens)
    positions = np.arange(ends[-1]) + np.repeat(np.asarray(context_lens) - (ends - query_lens), query_lens)
    tables = _block_tables(sequences, layout)
    return StepBatch(
        token_ids=_tensor(list(chain.from_iterable(s.token_ids for s in sequences)), device),
        positions=_tensor(positions, device),
        num_decodes=plan.num_decodes,
        query_lens=query_lens,
        context_lens=context_lens,
        has_initial_state=_tensor([c > 0 for c in context_lens], device, torch.bool),
        state_indices=_tensor([layout.state_index(s.unit) for s in sequences], device),
        block_tables=_tensor(tables, device),
        slot_mapping=_tensor(_slots(tables, positions, query_lens, layout), device),
        logits_indices=_tensor([e - 1 for s, e in zip(sequences, ends, strict=True) if s.sample], device),
    )


def _block_tables(sequences: Sequence[ScheduledSequence], layout: ArenaLayout) -> np.ndarray:
    width = max(len(s.block_table) for s in sequences)
    tables = np.zeros((len(sequences), width), dtype=np.int64)
    if layout.page.nbytes:
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.block_table)] = sequence.block_table
    return tables


def _slots(
    tables: np.ndarray, positions: np.ndarray, query_lens: tuple[int, ...], layout: ArenaLayout
) -> np.ndarray:
    """Where each token's K goes, counted in tokens of one slab from the arena's start."""
    if not layout.page.nbytes:
        return np.zeros(0, dtype=np.int64)
    page, offset = np.divmod(positions, layout.page.page_size)
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    return tables[rows, page] * layout.page.page_size + offset


def _tensor(
    values: np.ndarray | Sequence[int] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)
