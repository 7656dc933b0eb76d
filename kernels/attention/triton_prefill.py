"""Causal attention of new tokens over paged keys and values, as one Triton kernel (FlashAttention-2's order).

A program owns BLOCK_M query rows of one head. It walks the earlier context in its pages, then the new tokens
where they were just computed, dense, by tensor descriptors (a quarter faster than by pages), and last the
blocks that need a mask. Loads, never only scores, are masked by length: bytes behind a sequence's last token
may be NaN. Knows nothing of how pages are handed out.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridserve.kernels.attention.triton_parts import LOG2_E, load_rows, online_softmax, scores_of
from hybridserve.kernels.varlen import varlen_tables


@triton.jit
def _attend_pages(
    acc,
    peak,
    total,
    q,
    keys,
    values,
    table,
    start,
    end,
    skip_from,
    skip_to,
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
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tokens [start, end) of the sequence by its pages; masked, without [skip_from, skip_to)."""
    steps = tl.arange(0, BLOCK_N)
    guard: tl.constexpr = MASKED or D != BLOCK_D
    if MASKED:
        # blocks before the gap, then behind it; the last before it may be cut short by it
        before = tl.cdiv(skip_from - start, BLOCK_N)
        blocks = before + tl.cdiv(end - skip_to, BLOCK_N)
    else:
        blocks = (end - start) // BLOCK_N
    # with stages to spend, the next block's ids are carried, so that the stages all go to K and V
    carry: tl.constexpr = STAGES > 2 and not MASKED
    ids = tl.load(table + (start + steps) // PAGE, mask=start + steps < end, other=0)
    for i in tl.range(0, blocks, num_stages=STAGES):
        cols = start + i * BLOCK_N + steps
        limit = end
        if MASKED:
            cols = tl.where(i < before, cols, skip_to + (i - before) * BLOCK_N + steps)
            limit = tl.where(i < before, skip_from, end)
        if not carry:
            ids = tl.load(table + cols // PAGE, mask=cols < limit, other=0)
        k = load_rows(keys, ids, cols % PAGE, cols, limit, dims, k_page, k_token, D, guard)
        scores = scores_of(q, k, BLOCK_M, BLOCK_N, BLOCK_D, IEEE)
        if MASKED:
            visible = (cols[None, :] <= positions[:, None]) & (cols < limit)[None, :]
            if WINDOW:
                visible = visible & (positions[:, None] - cols[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        weights, shrink, peak, total = online_softmax(scores, peak, total, qk_scale)
        v = load_rows(values, ids, cols % PAGE, cols, limit, dims, v_page, v_token, D, guard)
        if IEEE:
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        if carry:
            following = cols + BLOCK_N
            ids = tl.load(table + following // PAGE, mask=following < end, other=0)
    return acc, peak, total


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens", "context_lens", "chunk_seqs", "chunk_ids"],
)
def _prefill_kernel(
    q,
    new_k,
    new_v,
    keys,
    values,
    out,
    lse,
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
    DENSE: tl.constexpr,
    LSE: tl.constexpr,
    WINDOW: tl.constexpr,
    IEEE: tl.constexpr,
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

    table = block_tables + seq.to(tl.int64) * table_stride
    kv_head = head // GROUP
    keys += kv_head * k_head
    values += kv_head * v_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # finite, so that a block of which a row sees nothing leaves exp2(0) and no NaN
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # tokens [skip_from, skip_to) are the new ones that every row sees
    start = 0
    skip_from = context
    skip_to = context
    if DENSE:
        skip_to += first
        for block in tl.range(begin, begin + first, BLOCK_N, num_stages=STAGES):
            k = new_k.load([block, kv_head * D])
            scores = scores_of(q_block, k, BLOCK_M, BLOCK_N, BLOCK_D, IEEE)
            weights, shrink, peak, total = online_softmax(scores, peak, total, qk_scale)
            v = new_v.load([block, kv_head * D])
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    if WINDOW:
        start = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
        skip_from = start
        skip_to = start
    else:
        if not DENSE:
            skip_from += first + 1
        # full blocks that every row sees need no mask
        full = skip_from // BLOCK_N * BLOCK_N
        acc, peak, total = _attend_pages(
            acc, peak, total, q_block, keys, values, table, start, full, full, full, positions, dims,
            qk_scale, window, k_page, k_token, v_page, v_token,
            PAGE, D, BLOCK_M, BLOCK_D, BLOCK_N, False, False, IEEE, STAGES,
        )  # fmt: skip
        start = full
        if not DENSE:
            skip_from = full
            skip_to = full
    acc, peak, total = _attend_pages(
        acc, peak, total, q_block, keys, values, table, start, end, skip_from, skip_to, positions, dims,
        qk_scale, window, k_page, k_token, v_page, v_token,
        PAGE, D, BLOCK_M, BLOCK_D, BLOCK_N, True, WINDOW, IEEE, STAGES,
    )  # fmt: skip
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + tokens[:, None] * out_token + head * out_head + dims[None, :], result, mask=row_mask)
    if LSE:
        natural = (peak + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + tokens * H + head, natural, mask=rows < query_len)


def prefill_config(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages: what fits the shared memory and registers of one multiprocessor."""
    if dtype == torch.float32:
        return (64, 32, 4, 1) if head_dim <= 128 else (32, 32, 4, 1)
    return 128, 64, 8, 2 if head_dim > 128 else 3


@lru_cache(maxsize=64)
def lengths_on(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [S] on the device; cached by value, so that the layers of one step share one copy."""
    host = torch.tensor(lengths, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _rows_descriptor(x: torch.Tensor, block_n: int) -> TensorDescriptor:
    """x [T, Hkv, D] as rows of all heads, read in blocks of block_n rows of one head."""
    if x.stride()[1:] != (x.shape[2], 1) or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    shape = [x.shape[0], x.shape[1] * x.shape[2]]
    return TensorDescriptor(x, shape, [x.stride(0), 1], [block_n, x.shape[2]])


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
    lse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of S sequences' new tokens, laid end to end, to their earlier tokens and themselves.

    q: [T, H, D], any D. k, v: [T, Hkv, D], this step's keys and values; they must be in the pages too.
    keys, values: [N, page_size, Hkv, D], rows may overlap. block_tables: int32 or int64 [S, max_pages].
        The last axes are dense.
    query_lens, context_lens: tokens of each sequence now and before. scale: > 0.
    window: a token attends to this many tokens up to itself; None: to all.
    lse: fp32 [T, H], receives log(sum(exp(scores))) of each row if given.
    Returns [T, H, D] in the dtype of q, in `out` if given. Sums in fp32; fp32 inputs are multiplied as such.
    """
    assert sum(query_lens) == q.shape[0] and len(query_lens) == len(context_lens) and scale > 0
    assert q.stride(2) == keys.stride(3) == values.stride(3) == block_tables.stride(1) == 1
    num_heads, head_dim = q.shape[1:]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.dtype == q.dtype and out.stride(2) == 1
    block_m, block_n, warps, stages = prefill_config(head_dim, q.dtype)
    tables = varlen_tables(query_lens, block_m, q.device)
    if not tables.chunk_seqs.shape[0]:
        return out
    ieee = q.dtype == torch.float32
    dense = not ieee and window is None and head_dim in (64, 128, 256)
    _prefill_kernel[(tables.chunk_seqs.shape[0] * num_heads,)](
        q,
        _rows_descriptor(k, block_n) if dense else k,
        _rows_descriptor(v, block_n) if dense else v,
        keys, values, out, out if lse is None else lse, block_tables,
        tables.cu_seqlens, lengths_on(context_lens, q.device), tables.chunk_seqs, tables.chunk_ids,
        scale * LOG2_E, 0 if window is None else window,
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
        DENSE=dense,
        LSE=lse is not None,
        WINDOW=window is not None,
        IEEE=ieee,
        STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return out
