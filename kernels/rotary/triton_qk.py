"""What happens to a full-attention layer's queries and keys before attention, on the GPU in one launch.

RMSNorm of each head, rotary embedding of its leading dims, and the write of K and V into their pages. The
angles' cosines and sines come from one small launch a step, since all layers share them. Computes in fp32 and
rounds once. Knows nothing of sequences or of how pages are handed out.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

# query heads of one program
MAX_HEADS = 4


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions_ptr"])
def _cos_sin_kernel(
    positions_ptr, frequency_ptr, cos_ptr, sin_ptr, num_tokens, HALF: tl.constexpr, TILE: tl.constexpr
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at < num_tokens * HALF
    position = tl.load(positions_ptr + at // HALF, mask, other=0).to(tl.float32)
    angle = position * tl.load(frequency_ptr + at % HALF, mask, other=0.0)
    tl.store(cos_ptr + at, tl.cos(angle), mask)
    tl.store(sin_ptr + at, tl.sin(angle), mask)


@triton.jit
def _norm_rotate_store(
    source,
    target,
    copy,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    known,
    live,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """Norm and rotate `heads` of `source`; store at `target` where `live`, always at `copy`."""
    row = (heads * D)[:, None]
    cols = tl.arange(0, BLOCK_D)
    mask = known[:, None] & (cols < D)[None, :]
    x = tl.load(source + row + cols[None, :], mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)
    passing = (x * scale * weight[None, :]).to(target.dtype.element_ty)
    mask = mask & (cols >= 2 * HALF)[None, :]
    if live:
        tl.store(target + row + cols[None, :], passing, mask)
    if HAS_COPY:
        tl.store(copy + row + cols[None, :], passing, mask)
    if HALF > 0:
        pairs = tl.arange(0, BLOCK_HALF)
        real = pairs < HALF
        mask = known[:, None] & real[None, :]
        at = row + pairs[None, :]
        # the lines are in the L1 already
        first = tl.load(source + at, mask, other=0.0).to(tl.float32) * scale
        second = tl.load(source + at + HALF, mask, other=0.0).to(tl.float32) * scale
        first *= tl.load(weight_ptr + pairs, real, other=0.0).to(tl.float32)[None, :]
        second *= tl.load(weight_ptr + HALF + pairs, real, other=0.0).to(tl.float32)[None, :]
        cos = tl.load(cos_ptr + pairs, real, other=0.0)[None, :]
        sin = tl.load(sin_ptr + pairs, real, other=0.0)[None, :]
        turned_first = (first * cos - second * sin).to(target.dtype.element_ty)
        turned_second = (second * cos + first * sin).to(target.dtype.element_ty)
        if live:
            tl.store(target + at, turned_first, mask)
            tl.store(target + at + HALF, turned_second, mask)
        if HAS_COPY:
            tl.store(copy + at, turned_first, mask)
            tl.store(copy + at + HALF, turned_second, mask)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _qk_norm_rope_write_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    key_slots_ptr,
    value_slots_ptr,
    slot_mapping_ptr,
    q_out_ptr,
    k_out_ptr,
    eps,
    qkv_stride,
    key_stride,
    value_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_AT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    Q_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    HAS_K_OUT: tl.constexpr,
):
    q_groups: tl.constexpr = (Q_HEADS + Q_ROWS - 1) // Q_ROWS
    token = (tl.program_id(0) // (q_groups + 1)).to(tl.int64)
    group = tl.program_id(0) % (q_groups + 1)
    qkv = qkv_ptr + token * qkv_stride
    cos, sin = cos_ptr + token * HALF, sin_ptr + token * HALF
    if group < q_groups:
        q_heads = group * Q_ROWS + tl.arange(0, Q_ROWS)
        q_out = q_out_ptr + token * Q_HEADS * D
        _norm_rotate_store(
            qkv,
            q_out,
            q_out,
            q_weight_ptr,
            cos,
            sin,
            q_heads,
            q_heads < Q_HEADS,
            token >= 0,
            eps,
            D,
            BLOCK_D,
            HALF,
            BLOCK_HALF,
            False,
        )
    else:
        kv_heads = tl.arange(0, KV_ROWS)
        known = kv_heads < KV_HEADS
        slot = tl.load(slot_mapping_ptr + token)
        cols = tl.arange(0, BLOCK_D)
        at = (kv_heads * D)[:, None] + cols[None, :]
        mask = known[:, None] & (cols < D)[None, :]
        if slot >= 0:
            v = tl.load(qkv + K_AT + KV_HEADS * D + at, mask, other=0.0)
            tl.store(value_slots_ptr + slot * value_stride + at, v, mask)
        _norm_rotate_store(
            qkv + K_AT,
            key_slots_ptr + slot * key_stride,
            k_out_ptr + token * KV_HEADS * D,
            k_weight_ptr,
            cos,
            sin,
            kv_heads,
            known,
            slot >= 0,
            eps,
            D,
            BLOCK_D,
            HALF,
            BLOCK_HALF,
            HAS_K_OUT,
        )


@lru_cache(maxsize=8)
def _frequencies(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """fp32 [rotary_dim // 2], by PyTorch on the CPU: the bits of the CPU path."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / theta**exponent).to(device)


def rotary_cos_sin(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T] -> (cos, sin), fp32 [T, rotary_dim // 2].

    The angles are fp32 products of position and fp32 frequency, as checkpoints were trained with; at large
    positions exact angles would differ from those. Capturable in a CUDA graph, once called for this theta.
    """
    half = rotary_dim // 2
    tokens = positions.shape[0]
    cos, sin = torch.empty(2, tokens, half, dtype=torch.float32, device=positions.device)
    if tokens * half:
        tile = 256
        _cos_sin_kernel[(triton.cdiv(tokens * half, tile),)](
            positions,
            _frequencies(rotary_dim, theta, positions.device),
            cos,
            sin,
            tokens,
            HALF=half,
            TILE=tile,
            num_warps=4,
        )
    return cos, sin


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    gated: bool,
    k_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate the queries and keys of T tokens, and write keys and values into their pages.

    qkv: [T, (Hq + Hq + 2 Hkv) * D] in the order q | gate | k | v, without the gate unless `gated`; the last
        axis dense.
    q_weight, k_weight: [D], what the normed heads are multiplied by: 1 + w, where a checkpoint holds w.
    rotary: cos and sin of `rotary_cos_sin`, fp32 [T, half], dense; dims (i, i + half) of each head turn.
    key_slots, value_slots: [slots, Hkv, D] in the dtype of qkv; row slot_mapping[t] (int64 [T]) takes token
        t's key and value. Where it is negative (padding) no page is touched.
    k_out: [T, Hkv, D], dense; takes the keys too, for attention that does not read them from pages.
    Returns q [T, Hq, D], dense, for padding too. Capturable in a CUDA graph.
    """
    tokens, width = qkv.shape
    kv_heads, dim = key_slots.shape[1:]
    q_heads = (width // dim - 2 * kv_heads) // (2 if gated else 1)
    half = rotary[0].shape[1]
    assert width == ((2 if gated else 1) * q_heads + 2 * kv_heads) * dim and 2 * half <= dim
    assert qkv.stride(1) == 1 and key_slots.stride()[1:] == value_slots.stride()[1:] == (dim, 1)
    q_out = torch.empty(tokens, q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_rows = min(MAX_HEADS, triton.next_power_of_2(q_heads))
    if tokens:
        _qk_norm_rope_write_kernel[(tokens * (triton.cdiv(q_heads, q_rows) + 1),)](
            qkv,
            q_weight,
            k_weight,
            *rotary,
            key_slots,
            value_slots,
            slot_mapping,
            q_out,
            q_out if k_out is None else k_out,
            eps,
            qkv.stride(0),
            key_slots.stride(0),
            value_slots.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            K_AT=(2 if gated else 1) * q_heads * dim,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            HALF=half,
            BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
            Q_ROWS=q_rows,
            KV_ROWS=triton.next_power_of_2(kv_heads),
            HAS_K_OUT=k_out is not None,
            num_warps=2,
        )
    return q_out
