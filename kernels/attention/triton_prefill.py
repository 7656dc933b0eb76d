"""Causal attention of new tokens over paged keys and values, as one Triton kernel (FlashAttention-2's order).

A program owns BLOCK_M query rows of one head and walks the pages of its sequence in blocks of BLOCK_N tokens;
the new tokens are in the pages already, so context and new tokens are one walk. Loads, never only scores, are
masked by length: bytes behind a sequence's last token may be NaN. Knows nothing of how pages are handed out.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from hybridserve.kernels.varlen import varlen_tables


@triton.jit
def load_rows(
    pages, ids, offsets, cols, limit, dims, stride_page, stride_token, D: tl.constexpr, MASK: tl.constexpr
):
    """Rows [BLOCK_N, BLOCK_D] of one KV head: token `offsets` of page `ids`; zero where cols >= limit."""
    rows = ids.to(tl.int64) * stride_page + offsets * stride_token
    pointers = pages + rows[:, None] + dims[None, :]
    if MASK:
        return tl.load(pointers, mask=(cols < limit)[:, None] & (dims < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    keys,
    values,
    table,
    start,
    end,
    positions,
    dims,
    qk_scale,
    window,
    k_page,
    k_token,
    v_page,
    v_token,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over tokens [start, end) of the sequence; start is a multiple of BLOCK_N."""
    steps = tl.arange(0, BLOCK_N)
    guard: tl.constexpr = MASKED or D != BLOCK_D
    # with stages to spend, carried, so that they all go to the loads of K and V
    carry: tl.constexpr = STAGES > 2
    ids = tl.load(table + (start + steps) // PAGE, mask=start + steps < end, other=0)
    for block in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        cols = block + steps
        if not carry:
            ids = tl.load(table + cols // PAGE, mask=cols < end, other=0)
        k = load_rows(keys, ids, cols % PAGE, cols, end, dims, k_page, k_token, D, guard)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            visible = (cols[None, :] <= positions[:, None]) & (cols < end)[None, :]
            if WINDOW:
                visible = visible & (positions[:, None] - cols[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
        p = tl.exp2(scores * qk_scale - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_rows(values, ids, cols % PAGE, cols, end, dims, v_page, v_token, D, guard)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
        if carry:
            following = cols + BLOCK_N
            ids = tl.load(table + following // PAGE, mask=following < end, other=0)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    q,
    keys,
    values,
    out,
    block_tables,
    cu_seqlens,
    context_lens,
    chunk_seqs,
    chunk_ids,
    qk_scale,
    window,
    q_token,
    q_head,
    out_token,
    out_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    table_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    # the last blocks of a sequence walk furthest: they go first, so that the tail of the grid is short; the
    # heads of one block run side by side and share its keys in the L2
    pid = tl.program_id(0)
    chunk = tl.num_programs(0) // H - 1 - pid // H
    head = pid % H
    seq = tl.load(chunk_seqs + chunk)
    first = tl.load(chunk_ids + chunk) * BLOCK_M
    begin = tl.load(cu_seqlens + seq)
    query_len = tl.load(cu_seqlens + seq + 1) - begin
    context = tl.load(context_lens + seq)

    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (begin + rows).to(tl.int64)
    row_mask = (rows < query_len)[:, None] & (dims < D)[None, :]
    q_block = tl.load(q + tokens[:, None] * q_token + head * q_head + dims[None, :], mask=row_mask, other=0.0)
    positions = context + rows
    end = context + tl.minimum(query_len, first + BLOCK_M)
    start = 0
    # blocks whose every token every row sees need no mask
    masked_from = (context + first + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        start = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
        masked_from = start

    table = block_tables + seq.to(tl.int64) * table_stride
    keys += head // GROUP * k_head
    values += head // GROUP * v_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # finite, so that a block of which a row sees nothing leaves exp2(0) and no NaN
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if not WINDOW:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_block, keys, values, table, start, masked_from, positions, dims,
            qk_scale, window, k_page, k_token, v_page, v_token,
            PAGE, D, BLOCK_D, BLOCK_N, False, False, PRECISION, STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_block, keys, values, table, masked_from, end, positions, dims,
        qk_scale, window, k_page, k_token, v_page, v_token,
        PAGE, D, BLOCK_D, BLOCK_N, True, WINDOW, PRECISION, STAGES,
    )  # fmt: skip
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + tokens[:, None] * out_token + head * out_head + dims[None, :], result, mask=row_mask)


def prefill_config(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: what fits the shared memory and registers of one multiprocessor."""
    if dtype == torch.float32:
        return (64, 32, 4, 1) if head_dim <= 128 else (32, 32, 4, 1)
    if head_dim > 128:
        return 128, 64, 8, 2
    return (128, 128, 8, 2) if head_dim > 64 else (128, 128, 8, 3)


@lru_cache(maxsize=64)
def lengths_on(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [S] on the device; cached by value, so that the layers of one step share one copy."""
    host = torch.tensor(lengths, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


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
) -> torch.Tensor:
    """Causal attention of S sequences' new tokens, laid end to end, to their earlier tokens and themselves.

    q: [T, H, D], any D. k, v: [T, Hkv, D], this step's keys and values; they must be in the pages too, which
        is where they are read.
    keys, values: [N, page_size, Hkv, D], rows may overlap. block_tables: int32 or int64 [S, max_pages].
    query_lens, context_lens: tokens of each sequence now and before. scale: > 0.
    window: a token attends to this many tokens up to itself; None: to all.
    Returns [T, H, D] in the dtype of q. Sums in fp32; fp32 inputs are multiplied as such.
    """
    assert sum(query_lens) == q.shape[0] and len(query_lens) == len(context_lens) and scale > 0
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_m, block_n, warps, stages = prefill_config(head_dim, q.dtype)
    tables = varlen_tables(query_lens, block_m, q.device)
    if not tables.chunk_seqs.shape[0]:
        return out
    _prefill_kernel[(tables.chunk_seqs.shape[0] * num_heads,)](
        q, keys, values, out, block_tables,
        tables.cu_seqlens, lengths_on(context_lens, q.device), tables.chunk_seqs, tables.chunk_ids,
        scale * 1.4426950408889634, 0 if window is None else window,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        block_tables.stride(0),
        H=num_heads,
        GROUP=num_heads // keys.shape[2],
        PAGE=keys.shape[1],
        D=head_dim,
        BLOCK_D=max(triton.next_power_of_2(head_dim), 16),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return out
