"""Where sequences of different lengths lie when they are laid end to end, as the device's kernels read it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch


@dataclass(frozen=True)
class VarlenTables:
    """Made once for a step's lengths and read by every layer.

    cu_seqlens: int32 [S + 1]; sequence s is tokens cu_seqlens[s] to cu_seqlens[s + 1].
    chunk_seqs, chunk_ids: int32 [C], one entry a chunk of `chunk_size` tokens of any sequence, in order: the
        sequence it belongs to, and its number there. Sequences without tokens have none.
    """

    cu_seqlens: torch.Tensor
    chunk_seqs: torch.Tensor
    chunk_ids: torch.Tensor
    max_query_len: int


@lru_cache(maxsize=32)
def varlen_tables(query_lens: tuple[int, ...], chunk_size: int, device: torch.device) -> VarlenTables:
    """The tables of these lengths; cached by value, so that the layers of one step share one copy."""
    counts = [-(-length // chunk_size) for length in query_lens]
    seqs = [s for s, count in enumerate(counts) for _ in range(count)]
    ids = [i for count in counts for i in range(count)]
    ends = list(accumulate(query_lens, initial=0))
    # one transfer for all three
    packed = torch.tensor(ends + seqs + ids, dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    cu_seqlens, chunk_seqs, chunk_ids = packed.split([len(ends), len(seqs), len(ids)])
    return VarlenTables(cu_seqlens, chunk_seqs, chunk_ids, max(query_lens, default=0))
