"""One new token a sequence attends to all of its pages: split over the context, then combined.

What bounds it is reading K and V once, so the query heads of a KV head ride along in one dot, and a row's
context is cut into splits that any program may take: the grid is fixed by the number of rows, the cutting is
done on the device from `seq_lens`, and a CUDA graph holds both. A row's cuts depend on its own length and the
batch's size, never on its neighbours' lengths.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from hybridserve.kernels.attention.triton_prefill import load_rows


@triton.jit
def _split_tokens(lens, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens of one split of rows of these lengths: at least MIN_SPLIT, and at most MAX_SPLITS splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(lens, MAX_SPLITS), MIN_SPLIT) * MIN_SPLIT, MIN_SPLIT)


@triton.jit(do_not_specialize=["num_rows", "window", "table_stride"])
def _decode_kernel(
    q,
    keys,
    values,
    out,
    partial,
    partial_lse,
    block_tables,
    seq_lens,
    num_rows,
    qk_scale,
    window,
    q_row,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    table_stride,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    batch = tl.arange(0, BLOCK_B)
    lens = tl.load(seq_lens + batch, mask=batch < num_rows, other=0).to(tl.int32)
    if WINDOW:
        lens = tl.minimum(lens, window)
    # item i is split i - (ends of the rows before) of the row it falls in
    ends = tl.cumsum(tl.cdiv(lens, _split_tokens(lens, MIN_SPLIT, MAX_SPLITS)), 0)
    num_items = tl.max(ends, 0) * HKV
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    steps = tl.arange(0, BLOCK_N)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # the KV heads of one split are neighbours in time: their rows are neighbours in memory
        kv_head = item % HKV
        place = item // HKV
        row = tl.sum((ends <= place).to(tl.int32), 0)
        split = place - tl.max(tl.where(ends <= place, ends, 0), 0)
        seq_len = tl.load(seq_lens + row).to(tl.int32)
        first = 0
        if WINDOW:
            first = tl.maximum(seq_len - window, 0)
        tokens = _split_tokens(seq_len - first, MIN_SPLIT, MAX_SPLITS)
        splits = tl.cdiv(seq_len - first, tokens)
        start = first + split * tokens
        end = tl.minimum(start + tokens, seq_len)

        row = row.to(tl.int64)
        head_mask = (heads < GROUP)[:, None] & (dims < D)[None, :]
        q_heads = kv_head * GROUP + heads
        q_rows = tl.load(
            q + row * q_row + q_heads[:, None] * q_head + dims[None, :], mask=head_mask, other=0.0
        )
        table = block_tables + row * table_stride
        k_base = keys + kv_head * k_head
        v_base = values + kv_head * v_head
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        row_max = tl.full([BLOCK_G], -1.0e30, tl.float32)
        row_sum = tl.zeros([BLOCK_G], tl.float32)
        for block in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            cols = block + steps
            ids = tl.load(table + cols // PAGE, mask=cols < end, other=0)
            k = load_rows(k_base, ids, cols % PAGE, cols, end, dims, k_page, k_token, D, True)
            scores = tl.dot(q_rows, tl.trans(k), input_precision=PRECISION)
            scores = tl.where((cols < end)[None, :], scores * qk_scale, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_max[:, None])
            shrink = tl.exp2(row_max - new_max)
            row_sum = row_sum * shrink + tl.sum(p, 1)
            v = load_rows(v_base, ids, cols % PAGE, cols, end, dims, v_page, v_token, D, True)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            row_max = new_max
        result = acc / row_sum[:, None]
        out_rows = row * (HKV * GROUP) + q_heads
        if splits == 1:
            pointers = out + out_rows[:, None] * D + dims[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), mask=head_mask)
        else:
            parts = out_rows * MAX_SPLITS + split
            tl.store(partial + parts[:, None] * D + dims[None, :], result, mask=head_mask)
            tl.store(partial_lse + parts, row_max + tl.log2(row_sum), mask=heads < GROUP)


@triton.jit(do_not_specialize=["window"])
def _combine_kernel(
    out,
    partial,
    partial_lse,
    seq_lens,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program a (row, head): the splits' outputs weighed by their sums; rows of length 0 become zero."""
    out_row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + out_row // H).to(tl.int32)
    if WINDOW:
        seq_len = tl.minimum(seq_len, window)
    splits = tl.cdiv(seq_len, _split_tokens(seq_len, MIN_SPLIT, MAX_SPLITS))
    dims = tl.arange(0, BLOCK_D)
    if splits != 1:
        steps = tl.arange(0, BLOCK_S)
        total = tl.zeros([BLOCK_D], tl.float32)
        weight_sum = 0.0
        peak = -1.0e30
        for start in range(0, splits, BLOCK_S):
            parts = start + steps
            lse = tl.load(
                partial_lse + out_row * MAX_SPLITS + parts, mask=parts < splits, other=float("-inf")
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            weights = tl.exp2(lse - new_peak)
            values = tl.load(
                partial + (out_row * MAX_SPLITS + parts)[:, None] * D + dims[None, :],
                mask=(parts < splits)[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(values * weights[:, None], 0)
            weight_sum = weight_sum * shrink + tl.sum(weights, 0)
            peak = new_peak
        result = tl.where(splits > 0, total / tl.maximum(weight_sum, 1.0e-30), 0.0)
        tl.store(out + out_row * D + dims, result.to(out.dtype.element_ty), mask=dims < D)


def decode_config(
    num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """BLOCK_N, MIN_SPLIT, MAX_SPLITS, stages.

    Blocks of 16 KB; splits long enough that their partial results cost a percent of what they read, but short
    where few rows would leave multiprocessors idle; partial results of at most 2,048 splits of all heads.
    """
    block_n = max(16, min(128, 16384 // (triton.next_power_of_2(head_dim) * dtype.itemsize)))
    min_split = 128 if num_rows * num_kv_heads <= 32 else 512
    max_splits = min(128, max(8, 2048 // num_rows))
    return block_n, min_split, max_splits, 1 if dtype == torch.float32 else 3


@lru_cache(maxsize=8)
def _num_programs(device: torch.device) -> int:
    """Two programs a multiprocessor; a few in the interpreter, so that each takes several splits."""
    if device.type != "cuda":
        return 3
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One token of each of B sequences attends to all of its sequence; can be captured in a CUDA graph.

    q: [B, H, D], any D. keys, values: [N, page_size, Hkv, D], rows may overlap.
    block_tables: int32 or int64 [B, max_pages].
    seq_lens: int32 or int64 [B] on the device, tokens of each sequence with the new one, whose key and value
        are in the pages already; 0 for a padded row, which reads no page and becomes zero.
    window: only the last `window` tokens are seen. Returns [B, H, D] in the dtype of q.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    block_n, min_split, max_splits, stages = decode_config(num_rows, num_kv_heads, head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    partial = torch.empty(num_rows, num_heads, max_splits, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_rows, num_heads, max_splits, dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tokens = 0 if window is None else window
    _decode_kernel[(_num_programs(q.device),)](
        q, keys, values, out, partial, partial_lse, block_tables, seq_lens,
        num_rows, scale * 1.4426950408889634, tokens,
        q.stride(0), q.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        block_tables.stride(0),
        HKV=num_kv_heads,
        GROUP=group,
        PAGE=keys.shape[1],
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_G=max(triton.next_power_of_2(group), 16),
        BLOCK_N=block_n,
        BLOCK_B=max(triton.next_power_of_2(num_rows), 256),
        MIN_SPLIT=min_split,
        MAX_SPLITS=max_splits,
        WINDOW=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=stages,
        num_warps=4,
    )  # fmt: skip
    _combine_kernel[(num_rows * num_heads,)](
        out, partial, partial_lse, seq_lens, tokens,
        H=num_heads,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=8,
        MIN_SPLIT=min_split,
        MAX_SPLITS=max_splits,
        WINDOW=window is not None,
        num_warps=4,
    )  # fmt: skip
    return out
