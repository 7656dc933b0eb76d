"""One new token a sequence attends to all of its pages: split over the context, then combined.

What bounds it is reading K and V once, so the query heads of a KV head ride along in one dot, and a row's
context is cut into splits that any program may take: the grid is fixed, the cutting is done on the device
from `seq_lens`, and a CUDA graph holds both. A row's cuts depend on its own length and the batch's size,
never on its neighbours' lengths. These decide only who takes which splits; a program that takes several of
one row goes through them without a pause.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from hybridserve.kernels.attention.triton_parts import LOG2_E, load_rows, online_softmax, scores_of


@triton.jit
def _split_tokens(lens, max_splits, aim, most, BLOCK_N: tl.constexpr):
    """Tokens of one split of rows of these lengths: `aim` splits a row, of 64 to `most` tokens."""
    tokens = tl.minimum(tl.maximum(tl.cdiv(lens, aim), 64), most)
    return tl.cdiv(tl.maximum(tokens, tl.cdiv(lens, max_splits)), BLOCK_N) * BLOCK_N


@triton.jit
def _attend_run(
    place,
    last,
    kv_head,
    ends,
    q,
    keys,
    values,
    out,
    partial,
    partial_lse,
    block_tables,
    seq_lens,
    max_splits,
    aim,
    most,
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
    WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Splits [place, last) of all rows' splits, one KV head; those of a row in one pass over its tokens."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    steps = tl.arange(0, BLOCK_N)
    head_mask = (heads < GROUP)[:, None] & (dims < D)[None, :]
    q_heads = kv_head * GROUP + heads
    k_base = keys + kv_head * k_head
    v_base = values + kv_head * v_head
    while place < last:
        row = tl.sum((ends <= place).to(tl.int32), 0).to(tl.int64)
        split = place - tl.max(tl.where(ends <= place, ends, 0), 0)
        seq_len = tl.load(seq_lens + row).to(tl.int32)
        first = 0
        if WINDOW:
            first = tl.maximum(seq_len - window, 0)
        tokens = _split_tokens(seq_len - first, max_splits, aim, most, BLOCK_N)
        splits = tl.cdiv(seq_len - first, tokens)
        here = tl.minimum(splits - split, last - place)
        place += here
        start = first + split * tokens
        end = tl.minimum(start + here * tokens, seq_len)
        cut = tl.minimum(start + tokens, end)
        q_rows = tl.load(
            q + row * q_row + q_heads[:, None] * q_head + dims[None, :], mask=head_mask, other=0.0
        )
        table = block_tables + row * table_stride
        out_rows = row * (HKV * GROUP) + q_heads
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        # carried, so that the pipeline's stages all go to the loads of K and V
        ids = tl.load(table + (start + steps) // PAGE, mask=start + steps < end, other=0)
        for block in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            cols = block + steps
            k = load_rows(k_base, ids, cols % PAGE, cols, end, dims, k_page, k_token, D, True)
            scores = scores_of(q_rows, k, BLOCK_G, BLOCK_N, BLOCK_D, IEEE)
            scores = tl.where((cols < end)[None, :], scores, float("-inf"))
            weights, shrink, peak, total = online_softmax(scores, peak, total, qk_scale)
            v = load_rows(v_base, ids, cols % PAGE, cols, end, dims, v_page, v_token, D, True)
            if IEEE:
                acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
            else:
                acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
            following = cols + BLOCK_N
            ids = tl.load(table + following // PAGE, mask=following < end, other=0)
            if block + BLOCK_N >= cut:
                result = acc / total[:, None]
                if splits == 1:
                    pointers = out + out_rows[:, None] * D + dims[None, :]
                    tl.store(pointers, result.to(out.dtype.element_ty), mask=head_mask)
                else:
                    parts = out_rows * max_splits + split
                    tl.store(partial + parts[:, None] * D + dims[None, :], result, mask=head_mask)
                    tl.store(partial_lse + parts, peak + tl.log2(total), mask=heads < GROUP)
                split += 1
                cut = tl.minimum(cut + tokens, end)
                # with the next block's peak this shrinks what was added up to nothing
                peak = tl.full([BLOCK_G], -1.0e30, tl.float32)


@triton.jit(
    do_not_specialize=["num_rows", "max_splits", "aim", "most", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
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
    max_splits,
    aim,
    most,
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
    WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
    STAGES: tl.constexpr,
):
    batch = tl.arange(0, BLOCK_B)
    lens = tl.load(seq_lens + batch, mask=batch < num_rows, other=0).to(tl.int32)
    if WINDOW:
        lens = tl.minimum(lens, window)
    # split i of all is split i - (ends of the rows before) of the row it falls in
    ends = tl.cumsum(tl.cdiv(lens, _split_tokens(lens, max_splits, aim, most, BLOCK_N)), 0)
    num_splits = tl.max(ends, 0)
    # a group of programs, one a KV head where there are enough, shares a run of splits: what they read at one
    # time are neighbours in memory
    groups = tl.maximum(tl.num_programs(0) // HKV, 1)
    lanes = tl.minimum(tl.num_programs(0) // groups, HKV)
    group = tl.program_id(0) // lanes
    run = tl.maximum(tl.cdiv(num_splits, groups), 1)
    # runs of one size begin and end with the rows, where all are equally long; where they would leave more
    # than a few groups without any, runs are as equal as can be
    place, last = group * run, (group + 1) * run
    if tl.cdiv(num_splits, run) * 16 < groups * 15:
        place, last = group * num_splits // groups, (group + 1) * num_splits // groups
    for kv_head in range(tl.program_id(0) % lanes, HKV, lanes):
        _attend_run(
            place, tl.minimum(last, num_splits), kv_head, ends,
            q, keys, values, out, partial, partial_lse, block_tables, seq_lens,
            max_splits, aim, most, qk_scale, window, q_row, q_head,
            k_page, k_token, k_head, v_page, v_token, v_head, table_stride,
            HKV, GROUP, PAGE, D, BLOCK_D, BLOCK_G, BLOCK_N, WINDOW, IEEE, STAGES,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["max_splits", "aim", "most", "window"], do_not_specialize_on_alignment=["seq_lens"]
)
def _combine_kernel(
    out,
    partial,
    partial_lse,
    seq_lens,
    max_splits,
    aim,
    most,
    window,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program a (row, head, BLOCK_D dims): the splits' outputs weighed; rows of length 0 become zero."""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    out_row = (tl.program_id(0) // blocks).to(tl.int64)
    seq_len = tl.load(seq_lens + out_row // H).to(tl.int32)
    if WINDOW:
        seq_len = tl.minimum(seq_len, window)
    splits = tl.cdiv(seq_len, _split_tokens(seq_len, max_splits, aim, most, BLOCK_N))
    if splits != 1:
        dims = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        first = out_row * max_splits
        result = tl.zeros([BLOCK_D], tl.float32)
        peak, total = -1.0e30, 0.0
        # most rows have no more splits than one piece, and wait for memory once
        for start in range(0, splits, PIECE):
            parts = start + tl.arange(0, PIECE)
            live = parts < splits
            lse = tl.load(partial_lse + first + parts, mask=live, other=float("-inf"))
            values = tl.load(
                partial + (first + parts)[:, None] * D + dims[None, :],
                mask=live[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            shrink = tl.exp2(peak - new_peak)
            weights = tl.exp2(lse - new_peak)
            result = result * shrink + tl.sum(values * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            peak = new_peak
        result /= tl.maximum(total, 1.0e-30)
        tl.store(out + out_row * D + dims, result.to(out.dtype.element_ty), mask=dims < D)


PROGRAMS_PER_PROCESSOR = 2
"""One multiplies while the other's block is on its way."""
MAX_SPLITS = 128
COMBINE_PIECE = 32
"""Splits that a program of the combining kernel weighs at a time."""


def decode_config(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """BLOCK_N, warps, stages: blocks of 32 KB of K and as much of V."""
    if dtype == torch.float32:
        return 32, 4, 1
    return min(128, 16384 // triton.next_power_of_2(head_dim)), 4, 2


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    """1 in the interpreter, so that each program takes several splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def split_config(num_rows: int, num_kv_heads: int, num_programs: int) -> tuple[int, int, int]:
    """The most splits a row may have, the number to aim at, and the most tokens of a split.

    Aimed at is the least number with which equally long rows keep 19 of 20 programs busy in the last round.
    The most bounds the partial results, fp32 [B, H, splits, D]. Short splits let rows of unequal lengths keep
    all programs busy to the end; where there is a row and KV head for each program, they cost more than that.
    """
    most = min(MAX_SPLITS, max(16, 4096 // triton.next_power_of_2(num_rows)))
    pairs = num_rows * num_kv_heads
    busy = [pairs * n / (triton.cdiv(pairs * n, num_programs) * num_programs) for n in range(1, most + 1)]
    aim = next((n for n, share in enumerate(busy, 1) if share >= 0.95), busy.index(max(busy)) + 1)
    return most, aim, 512 if pairs < num_programs else 2048


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each of B sequences attends to all of its sequence; can be captured in a CUDA graph.

    q: [B, H, D], any D. keys, values: [N, page_size, Hkv, D], rows may overlap.
    block_tables: int32 or int64 [B, max_pages]. The last axes are dense. scale: > 0.
    seq_lens: int32 or int64 [B] on the device, tokens of each sequence with the new one, whose key and value
        are in the pages already; 0 for a padded row, which reads no page and becomes zero.
    window: only the last `window` tokens are seen.
    Returns [B, H, D] in the dtype of q, in `out` if given (dense).
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    assert num_heads % num_kv_heads == 0 and scale > 0
    assert q.stride(2) == keys.stride(3) == values.stride(3) == block_tables.stride(1) == 1
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    if not num_rows:
        return out
    ieee = q.dtype == torch.float32
    block_n, warps, stages = decode_config(head_dim, q.dtype)
    num_programs = PROGRAMS_PER_PROCESSOR * _multiprocessors(q.device)
    max_splits, aim, split_tokens = split_config(num_rows, num_kv_heads, num_programs)
    partial = torch.empty(num_rows, num_heads, max_splits, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(num_rows, num_heads, max_splits, dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tokens = 0 if window is None else window
    _decode_kernel[(num_programs,)](
        q,
        keys, values, out, partial, partial_lse, block_tables, seq_lens,
        num_rows, max_splits, aim, split_tokens, scale * LOG2_E, tokens,
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
        WINDOW=window is not None,
        IEEE=ieee,
        STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    combine_d = min(block_d, 64)
    _combine_kernel[(num_rows * num_heads * triton.cdiv(head_dim, combine_d),)](
        out, partial, partial_lse, seq_lens, max_splits, aim, split_tokens, tokens,
        H=num_heads,
        D=head_dim,
        BLOCK_D=combine_d,
        PIECE=COMBINE_PIECE,
        BLOCK_N=block_n,
        WINDOW=window is not None,
        num_warps=4,
    )  # fmt: skip
    return out
