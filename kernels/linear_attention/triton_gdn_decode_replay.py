"""Gated DeltaNet's decode step from S + ring: as `triton_gdn_decode`, but S is written once in many steps.

With G the sum of the log decays since S was written, the step's own g included, and G_j that of entries up to j,
    S k = exp(G) S k + sum_j exp(G - G_j) u_j (k_j . k)        and the same for q,
so a step reads S, the ring's entries, and writes one entry. The README derives it. Knows nothing of when to
flush: that is `replay.replay_flushes`.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.replay import ReplayRing
from hybridserve.kernels.linear_attention.triton_decode_parts import (
    L2_EPS,
    dot_keys,
    key_tile,
    load_masked,
    read_state,
    state_tile,
    store_masked,
)
from hybridserve.kernels.linear_attention.triton_gdn_decode import (
    conv_window,
    convolve,
    copy_channels,
    gates,
    head_blocks,
    norm_and_gate,
    split_pair,
)


@triton.jit
def fold_ring(
    tile,
    g,
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
    MASKED: tl.constexpr,
):
    """exp(G) S + sum_j exp(G - G_j) u_j outer k_j over `count` entries, G starting from g; latest entry first."""
    total = g
    for j in range(0, count):
        total += tl.load(g_row + j)
    tile *= tl.exp(total)
    left = g
    for i in range(0, count):
        j = count - 1 - i
        u = load_masked(u_row + j * V + values, is_value, MASKED) * tl.exp(left)
        k = load_masked(k_row + j * K + keys, is_key, MASKED)
        tile += u[:, None, None] * k[None, :, :]
        left += tl.load(g_row + j)
    return tile


@triton.jit
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BARRIER: tl.constexpr = True,
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

    # all loads before the first use. what q, k and v are made of comes first: they are ready when the state arrives
    keys, is_key = key_tile(K, BLOCK_K)
    x_row = qkv + row * qkv_stride
    ring_row = conv_state + index * conv_stride
    # q and k as one tensor, and windows as tensors: of what has fewer elements than threads, Triton would load
    # and convolve copies in every warp
    pair = tl.arange(0, 2)[None, :, None]
    qk_channels = head // GROUP * K + pair * (HK * K) + keys[:, None, :]
    is_qk = (pair >= 0) & is_key[:, None, :]
    v_channels = 2 * HK * K + head * V + values
    lags = tl.arange(0, LAGS)
    qk_window, qk_taps = conv_window(
        x_row,
        ring_row,
        conv_weight,
        qk_channels[None],
        is_qk[None],
        lags[:, None, None, None],
        phase,
        CHANNELS,
        KERNEL,
        TAP_STRIDE,
        CHANNEL_STRIDE,
    )
    v_window, v_taps = conv_window(
        x_row,
        ring_row,
        conv_weight,
        v_channels[None],
        is_value[None],
        lags[:, None],
        phase,
        CHANNELS,
        KERNEL,
        TAP_STRIDE,
        CHANNEL_STRIDE,
    )
    g, beta = gates(a + row * a_stride + head, b + row * b_stride + head, A_log, dt_bias, head)
    z_vector = load_masked(z + row * z_stride + head * V + values, is_value, MASKED)
    weight = load_masked(norm_weight + values, is_value, MASKED)
    entries = tl.arange(0, WINDOW)
    channels = tl.arange(0, BLOCK_K)
    k_row = ring_k + index * ring_k_stride + head // GROUP * WINDOW * K
    u_row = ring_u + index * ring_u_stride + head * WINDOW * V
    g_row = ring_g + index * ring_g_stride + head * WINDOW
    is_entry = (entries < count)[:, None]
    old_k = tl.load(
        k_row + entries[:, None] * K + channels[None, :], mask=is_entry & (channels < K)[None, :], other=0.0
    )
    old_u = tl.load(u_row + entries[:, None] * V + values[None, :], mask=is_entry & is_value[None, :], other=0.0)
    old_g = tl.load(g_row + entries, mask=entries < count, other=0.0)
    # of row j the entries after j
    is_later = (entries[None, :] > entries[:, None]) & (entries < count)[None, :]
    later_g = tl.load(g_row + entries[None, :] + entries[:, None] * 0, mask=is_later, other=0.0)
    offsets, in_state = state_tile(keys, values, K, V)
    pointers = state + index * state_stride + head * V * K + offsets
    tile = load_masked(pointers, in_state, MASKED)
    if BARRIER:
        tl.debug_barrier()

    q, k = split_pair(convolve(qk_window, qk_taps, conv_bias, qk_channels, is_qk, HAS_BIAS), pair)
    v = convolve(v_window, v_taps, conv_bias, v_channels, is_value, HAS_BIAS)
    # sums over later entries: a difference of two running sums would lose small decays behind large ones
    left = tl.exp(g + tl.sum(later_g, 1))
    old_k = old_k.to(tl.float32)
    by_k = left * tl.sum(old_k * tl.reshape(k, [1, BLOCK_K]), 1)
    by_q = left * tl.sum(old_k * tl.reshape(q, [1, BLOCK_K]), 1)
    ring_by_k = tl.sum(by_k[:, None] * old_u, 0)
    ring_by_q = tl.sum(by_q[:, None] * old_u, 0)
    q_norm = tl.rsqrt(dot_keys(q, q) + L2_EPS) * scale
    k_norm = tl.rsqrt(dot_keys(k, k) + L2_EPS)
    own = dot_keys(k, q) * k_norm
    decay = tl.exp(g + tl.sum(old_g, 0))
    read_k = decay * read_state(tile, k) + ring_by_k
    read_q = decay * read_state(tile, q) + ring_by_q
    u = (v - k_norm * read_k) * beta
    o = q_norm * (read_q + own * u)
    store_masked(out_pointers, norm_and_gate(o, z_vector, weight, eps, V), is_value, MASKED)

    u *= k_norm
    if flush:
        tile = fold_ring(tile, g, count, k_row, u_row, g_row, keys, is_key, values, is_value, K, V, MASKED)
        store_masked(pointers, tile + u[:, None, None] * k[None, :, :], in_state, MASKED)
    else:
        store_masked(u_row + count * V + values, u, is_value, MASKED)
        tl.store(g_row + count, g)
        if head % GROUP == 0:
            store_masked(k_row + count * K + keys, k, is_key, MASKED)
    column = ring_row + phase * CHANNELS
    copy_channels(x_row, column, v_channels, is_value, MASKED)
    if head % GROUP == 0:
        copy_channels(x_row, column, qk_channels, is_qk, MASKED)


@triton.jit
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
    values = tl.arange(0, BLOCK_V)
    is_value = values < V
    keys, is_key = key_tile(K, BLOCK_K)
    offsets, in_state = state_tile(keys, values, K, V)
    pointers = state + index * state_stride + head * V * K + offsets
    k_row = ring_k + index * ring_k_stride + head // (HV // HK) * WINDOW * K
    u_row = ring_u + index * ring_u_stride + head * WINDOW * V
    g_row = ring_g + index * ring_g_stride + head * WINDOW
    tile = load_masked(pointers, in_state, MASKED)
    tile = fold_ring(tile, 0.0, count, k_row, u_row, g_row, keys, is_key, values, is_value, K, V, MASKED)
    store_masked(pointers, tile, in_state, MASKED)


def gdn_decode_replay(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
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
) -> torch.Tensor:
    """`gdn_decode_fused` from S + ring; arguments as there, and

    ring: its k in the dtype of qkv; rows `state_indices`, as of the states. Entries from `counts` on are not read.
    counts: int64 [B], valid entries before this step, < window. flushes: bool [B], see `replay_flushes`: where
        true, S takes the ring and this token and no entry is written; else S is only read, entry `counts` is
        written. The caller's next count is 0 or counts + 1.
    A row whose index is negative touches nothing, and its output is zero. Can be captured in a CUDA graph.
    """
    batch = qkv.shape[0]
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    assert qkv.shape[1] == conv_weight.shape[0] == channels and num_v_heads % num_k_heads == 0
    assert z.shape == (batch, num_v_heads * head_v_dim) and a.shape == b.shape == (batch, num_v_heads)
    assert state.shape[1:] == (num_v_heads, head_v_dim, head_k_dim) and state[0].is_contiguous()
    assert conv_state.shape[1:] == (conv_weight.shape[1], channels) and conv_state[0].is_contiguous()
    assert all(x.stride(1) == 1 for x in (qkv, z, a, b))
    _check_ring(ring, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    assert ring.k.dtype == qkv.dtype
    block_k, block_v, num_warps, registers = head_blocks(head_k_dim, head_v_dim)
    out = torch.empty(batch, num_v_heads * head_v_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    _gdn_decode_replay_kernel[(batch * num_v_heads,)](
        qkv,
        z,
        a,
        b,
        conv_weight,
        conv_weight if conv_bias is None else conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        ring.k,
        ring.u,
        ring.g,
        state_indices,
        positions,
        counts,
        flushes,
        out,
        eps,
        head_k_dim**-0.5,
        qkv.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        state.stride(0),
        ring.k.stride(0),
        ring.u.stride(0),
        ring.g.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        KERNEL=conv_weight.shape[1],
        LAGS=triton.next_power_of_2(conv_weight.shape[1]),
        TAP_STRIDE=conv_weight.stride(1),
        CHANNEL_STRIDE=conv_weight.stride(0),
        WINDOW=ring.window,
        HAS_BIAS=conv_bias is not None,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=num_warps,
        maxnreg=registers,
    )
    return out


def flush_replay(
    state: torch.Tensor, ring: ReplayRing, state_indices: torch.Tensor, counts: torch.Tensor
) -> None:
    """Fold the rings of R rows into their states, for whoever needs S itself (prefill, a snapshot kept bare).

    state: [N, Hv, V, K]. state_indices: int64 [R], distinct; negative ones are left out. counts: int64 [R], valid
    entries; where 0 nothing is read or written. The caller's counts are 0 afterwards.
    """
    num_v_heads, v_dim, k_dim = state.shape[1:]
    num_k_heads = ring.k.shape[1]
    _check_ring(ring, num_k_heads, num_v_heads, k_dim, v_dim)
    assert state[0].is_contiguous()
    rows = state_indices.shape[0]
    if rows == 0:
        return
    block_k, block_v, num_warps, registers = head_blocks(k_dim, v_dim)
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
        maxnreg=registers,
    )


def _check_ring(ring: ReplayRing, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int) -> None:
    window = ring.window
    assert window & (window - 1) == 0
    assert ring.k.shape[1:] == (num_k_heads, window, k_dim) and ring.k[0].is_contiguous()
    assert ring.u.shape[1:] == (num_v_heads, window, v_dim) and ring.u[0].is_contiguous()
    assert ring.g.shape[1:] == (num_v_heads, window) and ring.g[0].is_contiguous()
