"""Which attention runs: by device, and on a GPU the fastest that was measured for the shape at hand.

Figures: docs/log.md. Triton is imported on the first call with a GPU's tensor.
"""

from functools import lru_cache

import torch

from hybridserve.kernels.attention import cpu

CONTEXT_PIECES = (16384, 8192)
"""Earlier tokens that cuDNN attends at once, gathered from pages, the longest that fits first: bounds the
dense copies of K and V, and the number of plans."""
FUSED_HEAD_DIMS = (128, 256)
"""Where cuDNN was measured, and beat Triton by a third."""
FUSED_MIN_PAIRS = 2**23
"""Pairs of a query and a key below which cuDNN gains too little to build a plan for."""
FUSED_LENGTHS = (4096, 8192)
"""New tokens that cuDNN is given: a plan for another length costs 46 ms, so shorter chunks are filled up."""
FUSED_FILL = 7 / 8
"""How much of such a length real tokens have to be: a chunk that leaves room for decode rows is above it."""


@lru_cache(maxsize=8)
def _has_fused(device: torch.device) -> bool:
    """On Hopper, where it was measured, and where cuDNN has heads of 256."""
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device)[0] == 9


def fused_length(query_len: int) -> int | None:
    """The length of `FUSED_LENGTHS` that this many new tokens are filled up to; None: too few for it."""
    length = next((n for n in FUSED_LENGTHS if n >= query_len), None)
    return length if length is not None and query_len >= FUSED_FILL * length else None


def takes_fused(
    head_dim: int, dtype: torch.dtype, query_len: int, context_len: int, window: int | None
) -> bool:
    """Whether cuDNN, where there is one, attends this many new tokens of a sequence, and not Triton."""
    return (
        window is None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in FUSED_HEAD_DIMS
        and fused_length(query_len) is not None
        and query_len * (context_len + query_len // 2) >= FUSED_MIN_PAIRS
        # a context shorter than any piece goes through Triton, and takes the new tokens with it
        and (context_len == 0 or context_len >= CONTEXT_PIECES[-1])
    )


def build_plans(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    max_query_len: int,
    max_context_len: int,
) -> None:
    """What `attention_prefill` would build on the first long prompts, which takes up to seconds."""
    lengths = [length for length in FUSED_LENGTHS if takes_fused(head_dim, dtype, length, 0, None)]
    lengths = [length for length in lengths if FUSED_FILL * length <= max_query_len]
    if not lengths or device.type == "cpu" or not _has_fused(device):
        return
    from hybridserve.kernels.attention import fused

    pieces = [piece for piece in CONTEXT_PIECES if piece <= max_context_len]
    fused.build_plans(num_heads, num_kv_heads, head_dim, dtype, device, lengths, pieces)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store k, v [T, Hkv, D] at rows slot_mapping (int64 [T]) of key_slots, value_slots [slots, Hkv, D]."""
    if k.device.type == "cpu":
        return cpu.write_kv(k, v, key_slots, value_slots, slot_mapping)
    from hybridserve.kernels.attention import triton_write

    return triton_write.write_kv(k, v, key_slots, value_slots, slot_mapping)


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of S sequences' new tokens, laid end to end, to their earlier tokens and themselves.

    q: [T, H, D]. k, v: [T, Hkv, D], this step's keys and values (in the pages too).
    keys, values: [N, page_size, Hkv, D]. block_tables: int64 [S, max_pages], rows of keys of each sequence.
    query_lens, context_lens: tokens of each sequence now and before.
    window: a token attends to this many tokens up to itself; None: to all.
    Returns [T, H, D] in the dtype of q, in `out` where it is given (dense).
    """
    tables = (keys, values, block_tables)
    if q.device.type == "cpu":
        made = cpu.attention_prefill(q, k, v, *tables, query_lens, context_lens, scale=scale, window=window)
        return made if out is None else out.copy_(made)
    if not q.shape[0]:
        return torch.empty_like(q)
    from hybridserve.kernels.attention import fused, triton_prefill

    outs, first, start, begin = [], 0, 0, 0

    def by_triton(to: int, end: int) -> None:
        if end > start:
            outs.append(
                triton_prefill.attention_prefill(
                    q[start:end], k[start:end], v[start:end], keys, values, block_tables[first:to],
                    query_lens[first:to], context_lens[first:to], scale=scale, window=window,
                    out=out if to - first == len(query_lens) else None,
                )
            )  # fmt: skip

    for s, length in enumerate(query_lens):
        if _has_fused(q.device) and takes_fused(q.shape[2], q.dtype, length, context_lens[s], window):
            by_triton(s, begin)
            first, start = s + 1, begin + length
            rows = slice(begin, start)
            outs.append(
                fused.attention_prefill(
                    q[rows], k[rows], v[rows], keys, values, block_tables[s], context_lens[s], scale=scale
                )
            )
        begin += length
    by_triton(len(query_lens), begin)
    if len(outs) != 1:
        return torch.cat(outs, out=out)
    return outs[0] if out is None or outs[0] is out else out.copy_(outs[0])


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each of B sequences attends to all of its sequence.

    q: [B, H, D]. keys, values: [N, page_size, Hkv, D].
    block_tables: int64 [B, max_pages].
    seq_lens: tokens of each sequence with the new one, whose key and value are in the pages already: numbers
        on a CPU, an integer tensor [B] on the device on a GPU. 0: a padded row, which becomes zero.
    window: only the last `window` tokens are seen.
    Returns [B, H, D] in the dtype of q, in `out` where it is given (dense).
    """
    if q.device.type == "cpu":
        lens = tuple(seq_lens.tolist()) if isinstance(seq_lens, torch.Tensor) else seq_lens
        made = cpu.attention_decode(q, keys, values, block_tables, lens, scale=scale, window=window)
        return made if out is None else out.copy_(made)
    from hybridserve.kernels.attention import triton_decode

    assert isinstance(seq_lens, torch.Tensor), "a GPU reads the lengths on the device"
    return triton_decode.attention_decode(
        q, keys, values, block_tables, seq_lens, scale=scale, window=window, out=out
    )
