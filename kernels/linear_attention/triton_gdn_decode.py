"""Gated DeltaNet's decode step in one launch: convolution, gates, recurrence and gated norm, states in place.

One program owns one value head of one sequence: its whole state is in registers, so the norm over the head's
output needs no second pass, and the value heads of one key head each convolve that head's q and k again (some
KB from the L2). Knows nothing of projections or of how tokens are batched.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_decode_parts import (
    L2_EPS,
    exp_exact,
    key_tile,
    load_masked,
    read_state,
    sigmoid,
    softplus,
    state_tile,
    store_masked,
)

MAX_TILE = 32768
"""Elements of a head's state, each dimension rounded up to a power of two, that one program can hold."""


@triton.jit
def conv_window(
    x_row,
    ring_row,
    weight,
    channels,
    mask,
    lag,
    phase,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
):
    """The inputs and taps that one token's convolution meets, as fp32; lag, channels, mask: broadcastable.

    The ring's column `phase` belongs to this token and is never read, so its one writer races with nobody.
    """
    column = (phase + KERNEL - lag) % KERNEL
    new = tl.load(x_row + channels + lag * 0, mask=mask & (lag == 0), other=0.0)
    old = tl.load(ring_row + column * CHANNELS + channels, mask=mask & (lag > 0) & (lag < KERNEL), other=0.0)
    taps = weight + (KERNEL - 1 - lag) * TAP_STRIDE + channels * CHANNEL_STRIDE
    return new + old, tl.load(taps, mask=mask & (lag < KERNEL), other=0.0)


@triton.jit
def convolve(window, taps, bias, channels, mask, HAS_BIAS: tl.constexpr):
    """silu(window . taps + bias) over the first axis, rounded to the dtype of the window, as fp32."""
    y = tl.sum(window.to(tl.float32) * taps.to(tl.float32), 0)
    if HAS_BIAS:
        y += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    return (y * sigmoid(y)).to(window.dtype).to(tl.float32)


@triton.jit
def keep_input(column, channels, window, lag, mask):
    """Put the token's inputs, lag 0 of a window, into its column of the ring."""
    tl.store(column + channels + lag * 0, window, mask=mask & (lag == 0))


@triton.jit
def gates(a, b, A_log, dt_bias, head):
    """-exp(A_log) softplus(a + dt_bias) and sigmoid(b) of one head, from pointers to its a and b."""
    x = tl.load(a).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    g = -exp_exact(tl.load(A_log + head).to(tl.float32)) * softplus(x)
    return g, sigmoid(tl.load(b).to(tl.float32))


@triton.jit
def key_products(k, q):
    """k . k, q . q and k . q of two [BLOCK_K / 32, 32]: one sum over warps for all three."""
    which = tl.arange(0, 4)[:, None, None]
    products = tl.where(which == 2, k[None], tl.where(which == 1, q[None], k[None]))
    products *= tl.where(which == 0, k[None], q[None])
    sums = tl.sum(tl.sum(products, 2), 1)
    which = tl.arange(0, 4)
    kk = tl.sum(tl.where(which == 0, sums, 0.0), 0)
    qq = tl.sum(tl.where(which == 1, sums, 0.0), 0)
    return kk, qq, tl.sum(tl.where(which == 2, sums, 0.0), 0)


@triton.jit
def norm_and_gate(o, z, weight, eps, V: tl.constexpr):
    """weight * o / rms(o) * silu(z) over the V values of one head (zeros behind them)."""
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight * (z * sigmoid(z))


@triton.jit(do_not_specialize_on_alignment=["a", "b", "state_indices", "positions"])
def _gdn_decode_kernel(
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
    state_indices,
    positions,
    out,
    eps,
    scale,
    qkv_stride,
    z_stride,
    a_stride,
    b_stride,
    conv_stride,
    state_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KERNEL: tl.constexpr,
    LAGS: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    if index < 0:
        store_masked(out_pointers, tl.zeros([BLOCK_V], tl.float32), is_value, MASKED)
        return

    state_row = state + index * state_stride + head * V * K
    # what q, k and v are made of is loaded first: they are ready by the time the state is
    keys, is_key = key_tile(K, BLOCK_K)
    q_channels = head // GROUP * K + keys
    k_channels = q_channels + HK * K
    v_channels = 2 * HK * K + head * V + values
    x_row = qkv + row * qkv_stride
    ring_row = conv_state + index * conv_stride
    lags = tl.arange(0, LAGS)
    key_lags = lags[:, None, None]
    q_window, q_taps = conv_window(
        x_row,
        ring_row,
        conv_weight,
        q_channels[None],
        is_key[None],
        key_lags,
        phase,
        CHANNELS,
        KERNEL,
        TAP_STRIDE,
        CHANNEL_STRIDE,
    )
    k_window, k_taps = conv_window(
        x_row,
        ring_row,
        conv_weight,
        k_channels[None],
        is_key[None],
        key_lags,
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

    q = convolve(q_window, q_taps, conv_bias, q_channels, is_key, HAS_BIAS)
    k = convolve(k_window, k_taps, conv_bias, k_channels, is_key, HAS_BIAS)
    v = convolve(v_window, v_taps, conv_bias, v_channels, is_value, HAS_BIAS)
    column = ring_row + phase * CHANNELS
    is_writer = is_key[None] & (keys[None] * 0 + head % GROUP == 0)
    keep_input(column, q_channels[None], q_window, key_lags, is_writer)
    keep_input(column, k_channels[None], k_window, key_lags, is_writer)
    keep_input(column, v_channels[None], v_window, lags[:, None], is_value[None])
    offsets, in_state = state_tile(keys, values, K, V)
    tile = load_masked(state_row + offsets, in_state, MASKED)
    z_vector = load_masked(z + row * z_stride + head * V + values, is_value, MASKED)
    weight = load_masked(norm_weight + values, is_value, MASKED)
    # the norms of q and k are factors of scalars, so that S k need not wait for them
    kk, qq, kq = key_products(k, q)
    k_norm = tl.rsqrt(kk + L2_EPS)
    q_norm = tl.rsqrt(qq + L2_EPS) * scale
    decay = exp_exact(g)
    u = (v - decay * k_norm * read_state(tile, k)) * beta * k_norm
    o = q_norm * (decay * read_state(tile, q) + kq * u)
    store_masked(state_row + offsets, tile * decay + u[:, None, None] * k[None, :, :], in_state, MASKED)
    store_masked(out_pointers, norm_and_gate(o, z_vector, weight, eps, V), is_value, MASKED)


def head_blocks(head_k_dim: int, head_v_dim: int) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_V, num_warps) of a program that holds one head's state.

    Raises:
        ValueError: a head's state is more than one program can hold.
    """
    block_k, block_v = (max(32, triton.next_power_of_2(dim)) for dim in (head_k_dim, head_v_dim))
    if block_k * block_v > MAX_TILE:
        raise ValueError(
            f"head_k_dim={head_k_dim} and head_v_dim={head_v_dim} round up to {block_k} x {block_v}; "
            f"the fused decode holds a head's state of {MAX_TILE} elements at most"
        )
    # 128 elements a thread, so two programs of 4 warps on a multiprocessor: with 8 warps a program, two fit
    # only with 128 registers a thread, and what spills waits behind the state's loads
    return block_k, block_v, max(1, block_k * block_v // 4096)


def gdn_decode_fused(
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
    state_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> torch.Tensor:
    """One token of each of B sequences, from the projections to what the output projection takes.

    With C = 2 Hk K + Hv V channels:
    qkv: [B, C], q|k|v as projected. z: [B, Hv V]. a, b: [B, Hv]. All may be views of one projection's output.
    conv_weight: [C, kernel], its last column meets the current token; fast only as the transposed view of one
        that lies as [kernel, C]. conv_bias: [C] or None.
    A_log, dt_bias: [Hv]. norm_weight: [V], plain. eps: of the norm; q and k are normalised with 1e-6.
    conv_state: [N, kernel, C], dtype of qkv, input of position p in column p % kernel; takes this token's.
    state: [N, Hv, V, K], fp32 or bf16, arithmetic in fp32. state_indices: int64 [B], distinct rows of both,
        changed in place. A row whose index is negative touches neither, and its output is zero.
    positions: int64 [B], position of each token in its sequence.
    Returns norm(o) * silu(z), [B, Hv V] in the dtype of qkv, as
        q, k, v = silu(conv(qkv)), rounded to the dtype of qkv;  q, k normalised over K;  q scaled by K^-0.5
        g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b);  o as in `linear_attention_reference`
    (Yang et al. 2024, arXiv 2412.06464.) Can be captured in a CUDA graph.
    """
    batch = qkv.shape[0]
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    assert qkv.shape[1] == conv_weight.shape[0] == channels and num_v_heads % num_k_heads == 0
    assert z.shape == (batch, num_v_heads * head_v_dim) and a.shape == b.shape == (batch, num_v_heads)
    assert state.shape[1:] == (num_v_heads, head_v_dim, head_k_dim) and state[0].is_contiguous()
    assert conv_state.shape[1:] == (conv_weight.shape[1], channels) and conv_state[0].is_contiguous()
    assert all(x.stride(1) == 1 for x in (qkv, z, a, b))
    block_k, block_v, num_warps = head_blocks(head_k_dim, head_v_dim)
    out = torch.empty(batch, num_v_heads * head_v_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    _gdn_decode_kernel[(batch * num_v_heads,)](
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
        state_indices,
        positions,
        out,
        eps,
        head_k_dim**-0.5,
        qkv.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        conv_state.stride(0),
        state.stride(0),
        HK=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        KERNEL=conv_weight.shape[1],
        LAGS=triton.next_power_of_2(conv_weight.shape[1]),
        TAP_STRIDE=conv_weight.stride(1),
        CHANNEL_STRIDE=conv_weight.stride(0),
        HAS_BIAS=conv_bias is not None,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
    return out
