"""Gated DeltaNet's decode step from S + ring: as `triton_gdn_decode`, but S is written once in many steps.

With G the sum of the log decays since S was written, the step's own included, and G_j that of entries up to
j, the state's value times k is exp(G) S k + sum_j exp(G - G_j) u_j (k_j . k), and so for q: a step reads S
and the entries, and writes one entry (README). Knows nothing of when to flush: `replay_entries`.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.replay import ReplayRing
from hybridserve.kernels.linear_attention.triton_decode_parts import (
    L2_EPS,
    exp_exact,
    key_tile,
    load_masked,
    read_state,
    state_tile,
    store_masked,
)
from hybridserve.kernels.linear_attention.triton_gdn_parts import (
    convolve_head,
    gates,
    head_blocks,
    head_windows,
    key_products,
    norm_and_gate,
    step_arguments,
)


@triton.jit
def ring_entry(k_row, u_row, g_row, j, keys, is_key, values, is_value, K: tl.constexpr, V: tl.constexpr):
    """(k, u, g) of entry j; k and u are zero where j is negative."""
    u = tl.load(u_row + j * V + values, mask=is_value & (values * 0 + j >= 0), other=0.0)
    k = tl.load(k_row + j * K + keys, mask=is_key & (keys * 0 + j >= 0), other=0.0)
    return k, u, tl.load(g_row + tl.maximum(j, 0))


@triton.jit
def fold_ring(
    tile,
    decay,
    left,
    count,
    k_row,
    u_row,
    g_row,
    keys,
    is_key,
    values,
    is_value,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """decay S + sum_j exp(left + later g) u_j outer k_j over `count` entries, `decay` that of all of them.

    The latest entry first: exponentials are of sums of later g, never of a difference of two sums.
    """
    tile *= decay
    # two entries at a time, so that their loads wait together, and while the two before them are added
    j = count - 1
    k0, u0, g0 = ring_entry(k_row, u_row, g_row, j, keys, is_key, values, is_value, K, V)
    k1, u1, g1 = ring_entry(k_row, u_row, g_row, j - 1, keys, is_key, values, is_value, K, V)
    for _ in range(0, count, 2):
        j -= 2
        k2, u2, g2 = ring_entry(k_row, u_row, g_row, j, keys, is_key, values, is_value, K, V)
        k3, u3, g3 = ring_entry(k_row, u_row, g_row, j - 1, keys, is_key, values, is_value, K, V)
        tile += (u0 * exp_exact(left))[:, None, None] * k0.to(tl.float32)[None, :, :]
        tile += (u1 * exp_exact(left + g0))[:, None, None] * k1.to(tl.float32)[None, :, :]
        left += g0 + g1
        k0, u0, g0 = k2, u2, g2
        k1, u1, g1 = k3, u3, g3
    return tile


@triton.jit(
    do_not_specialize_on_alignment=["a", "b", "state_indices", "positions", "counts", "flushes"],
)
def _gdn_decode_replay_kernel(
    qkv,
    z,
    a,
    b,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    norm_weight,
    conv_state,
    state,
    ring_k,
    ring_u,
    ring_g,
    state_indices,
    positions,
    counts,
    flushes,
    out,
    eps,
    scale,
    qkv_stride,
    z_stride,
    a_stride,
    b_stride,
    conv_stride,
    state_stride,
    ring_k_stride,
    ring_u_stride,
    ring_g_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KERNEL: tl.constexpr,
    LAGS: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    MASKED: tl.constexpr = BLOCK_K != K or BLOCK_V != V
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    GROUP: tl.constexpr = HV // HK
    row = (tl.program_id(0) // HV).to(tl.int64)
    head = tl.program_id(0) % HV
    values = tl.arange(0, BLOCK_V)
    is_value = values < V
    out_pointers = out + row * HV * V + head * V + values
    index = tl.load(state_indices + row)
    phase = (tl.load(positions + row) % KERNEL).to(tl.int32)
    count = tl.load(counts + row).to(tl.int32)
    flush = tl.load(flushes + row) != 0
    if index < 0:
        store_masked(out_pointers, tl.zeros([BLOCK_V], tl.float32), is_value, MASKED)
        return

    state_row = state + index * state_stride + head * V * K
    k_row = ring_k + index * ring_k_stride + head // GROUP * WINDOW * K
    u_row = ring_u + index * ring_u_stride + head * WINDOW * V
    g_row = ring_g + index * ring_g_stride + head * WINDOW
    # what q, k, v and the ring's part are made of is loaded first: they are ready by the time the state is
    keys, is_key = key_tile(K, BLOCK_K)
    x_row = qkv + row * qkv_stride
    ring_row = conv_state + index * conv_stride
    q_window, q_taps, k_window, k_taps, v_window, v_taps = head_windows(
        x_row, ring_row, conv_weight, head, keys, is_key, values, is_value, phase,
        HK, HV, K, V, KERNEL, LAGS, TAP_STRIDE, CHANNEL_STRIDE,
    )  # fmt: skip
    g, beta = gates(a + row * a_stride + head, b + row * b_stride + head, A_log, dt_bias, head)
    entries = tl.arange(0, WINDOW)
    is_entry = entries < count
    # a matter of layouts, not of values. seeing only runs of four keys, Triton loads these rows as it does
    # the state's fp32 ones, and both share k and q; seeing no runs in u, it gives a thread one value of each
    old_k_offsets, in_old_k = state_tile(keys // 4 * 4 + keys % 4, entries, K, WINDOW)
    old_k = tl.load(k_row + old_k_offsets, mask=in_old_k & is_entry[:, None, None], other=0.0)
    u_offsets = entries[None, :] * V + tl.where(is_value, values, 0)[:, None]
    old_u = tl.load(u_row + u_offsets, mask=is_entry[None, :] & is_value[:, None], other=0.0)
    old_g = tl.load(g_row + entries, mask=is_entry, other=0.0)
    next_g = tl.load(g_row + entries + 1, mask=entries + 1 < count, other=0.0)

    q, k, v = convolve_head(
        q_window, q_taps, k_window, k_taps, v_window, v_taps, conv_bias, ring_row + phase * CHANNELS,
        head, keys, is_key, values, is_value, HK, HV, K, V, LAGS, HAS_BIAS,
    )  # fmt: skip
    offsets, in_state = state_tile(keys, values, K, V)
    tile = load_masked(state_row + offsets, in_state, MASKED)
    if NORMED:
        z_vector = load_masked(z + row * z_stride + head * V + values, is_value, MASKED)
        weight = load_masked(norm_weight + values, is_value, MASKED)
    kk, qq, kq = key_products(k, q)
    k_norm = tl.rsqrt(kk + L2_EPS)
    q_norm = tl.rsqrt(qq + L2_EPS) * scale
    decay = exp_exact(g + tl.sum(old_g, 0))
    # sums of later entries' g: a difference of two running sums would lose small decays behind large ones
    left = exp_exact(g + tl.cumsum(next_g, 0, reverse=True))
    old_k = old_k.to(tl.float32)
    ring_by_k = tl.sum((left * read_state(old_k, k))[None, :] * old_u, 1)
    ring_by_q = tl.sum((left * read_state(old_k, q))[None, :] * old_u, 1)
    u = (v - k_norm * (decay * read_state(tile, k) + ring_by_k)) * beta * k_norm
    o = q_norm * (decay * read_state(tile, q) + ring_by_q + kq * u)
    if NORMED:
        o = norm_and_gate(o, z_vector, weight, eps, V)
    store_masked(out_pointers, o, is_value, MASKED)
    if flush:
        # read again, from the L2 and once in a window: nothing is held until here for it
        tile = load_masked(state_row + offsets, in_state, MASKED)
        tile = fold_ring(tile, decay, g, count, k_row, u_row, g_row, keys, is_key, values, is_value, K, V)
        store_masked(state_row + offsets, tile + u[:, None, None] * k[None, :, :], in_state, MASKED)
    else:
        store_masked(u_row + count * V + values, u, is_value, MASKED)
        tl.store(g_row + count, g)
        if head % GROUP == 0:
            store_masked(k_row + count * K + keys, k, is_key, MASKED)


@triton.jit(do_not_specialize_on_alignment=["state_indices", "counts"])
def _flush_kernel(
    state,
    ring_k,
    ring_u,
    ring_g,
    state_indices,
    counts,
    state_stride,
    ring_k_stride,
    ring_u_stride,
    ring_g_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    MASKED: tl.constexpr = BLOCK_K != K or BLOCK_V != V
    row = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    index = tl.load(state_indices + row)
    count = tl.load(counts + row).to(tl.int32)
    if (index < 0) | (count == 0):
        return
    keys, is_key = key_tile(K, BLOCK_K)
    state_row = state + index * state_stride + head * V * K
    k_row = ring_k + index * ring_k_stride + head // (HV // HK) * WINDOW * K
    u_row = ring_u + index * ring_u_stride + head * WINDOW * V
    g_row = ring_g + index * ring_g_stride + head * WINDOW
    values = tl.arange(0, BLOCK_V)
    is_value = values < V
    entries = tl.arange(0, WINDOW)
    offsets, in_state = state_tile(keys, values, K, V)
    tile = load_masked(state_row + offsets, in_state, MASKED)
    decay = exp_exact(tl.sum(tl.load(g_row + entries, mask=entries < count, other=0.0), 0))
    none = tl.full((), 0.0, tl.float32)
    tile = fold_ring(tile, decay, none, count, k_row, u_row, g_row, keys, is_key, values, is_value, K, V)
    store_masked(state_row + offsets, tile, in_state, MASKED)


def gdn_decode_replay(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    ring: ReplayRing,
    state_indices: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    flushes: torch.Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `dispatch.gdn_decode_replay`. One launch, which a CUDA graph can hold."""
    step = step_arguments(
        qkv, z, a, b, conv_weight, conv_bias, conv_state, state,
        num_k_heads, num_v_heads, head_k_dim, head_v_dim,
    )  # fmt: skip
    _check_ring(ring, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    assert ring.k.dtype == qkv.dtype
    if out is None:
        out = torch.empty(z.shape, dtype=qkv.dtype, device=qkv.device)
    assert out.shape == z.shape and out.dtype == qkv.dtype and out.is_contiguous()
    if out.shape[0] == 0:
        return out
    _gdn_decode_replay_kernel[(out.shape[0] * num_v_heads,)](
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=qkv if norm_weight is None else norm_weight,
        NORMED=norm_weight is not None,
        eps=eps,
        ring_k=ring.k,
        ring_u=ring.u,
        ring_g=ring.g,
        ring_k_stride=ring.k.stride(0),
        ring_u_stride=ring.u.stride(0),
        ring_g_stride=ring.g.stride(0),
        state_indices=state_indices,
        positions=positions,
        counts=counts,
        flushes=flushes,
        out=out,
        WINDOW=ring.window,
        **step,
    )
    return out


def flush_replay(
    state: torch.Tensor, ring: ReplayRing, state_indices: torch.Tensor, counts: torch.Tensor
) -> None:
    """Fold the rings of R rows into their states, for whoever needs S itself (prefill, a snapshot kept bare).

    state: [N, Hv, V, K]. state_indices: int64 [R], distinct; negative ones are left out. counts: int64 [R],
    valid entries; where 0 nothing is read or written. The caller's counts are 0 afterwards.
    """
    num_v_heads, v_dim, k_dim = state.shape[1:]
    num_k_heads = ring.k.shape[1]
    _check_ring(ring, num_k_heads, num_v_heads, k_dim, v_dim)
    assert state[0].is_contiguous()
    rows = state_indices.shape[0]
    if rows == 0:
        return
    block_k, block_v, num_warps = head_blocks(k_dim, v_dim)
    _flush_kernel[(rows * num_v_heads,)](
        state,
        ring.k,
        ring.u,
        ring.g,
        state_indices,
        counts,
        state.stride(0),
        ring.k.stride(0),
        ring.u.stride(0),
        ring.g.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=k_dim,
        V=v_dim,
        WINDOW=ring.window,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )


def _check_ring(ring: ReplayRing, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int) -> None:
    window = ring.window
    assert window & (window - 1) == 0
    assert ring.k.shape[1:] == (num_k_heads, window, k_dim) and ring.k[0].is_contiguous()
    assert ring.u.shape[1:] == (num_v_heads, window, v_dim) and ring.u[0].is_contiguous()
    assert ring.g.shape[1:] == (num_v_heads, window) and ring.g[0].is_contiguous()
