"""What Gated DeltaNet's decode kernels share: convolution, gates, the products of q and k, the gated norm.

Both give one program a value head of one sequence. Loads stand apart from what is made of them, so that a
kernel can issue all of its loads first. Knows nothing of states or rings of entries.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_decode_parts import sigmoid, softplus

MAX_TILE = 32768
"""Elements of a head's state, each dimension rounded up to a power of two, that one program can hold."""


@triton.jit
def head_channels(head, keys, values, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Channels of a value head's q, k and v in q|k|v, shaped as keys, keys and values."""
    q_channels = head // (HV // HK) * K + keys
    return q_channels, q_channels + HK * K, 2 * HK * K + head * V + values


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
def head_windows(
    x_row,
    ring_row,
    weight,
    head,
    keys,
    is_key,
    values,
    is_value,
    phase,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KERNEL: tl.constexpr,
    LAGS: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
):
    """`conv_window` of a head's q, k and v: (window, taps) each, with lags along the first axis."""
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    q_channels, k_channels, v_channels = head_channels(head, keys, values, HK, HV, K, V)
    lags = tl.arange(0, LAGS)
    key_lags = lags[:, None, None]
    q_window, q_taps = conv_window(
        x_row, ring_row, weight, q_channels[None], is_key[None], key_lags, phase,
        CHANNELS, KERNEL, TAP_STRIDE, CHANNEL_STRIDE,
    )  # fmt: skip
    k_window, k_taps = conv_window(
        x_row, ring_row, weight, k_channels[None], is_key[None], key_lags, phase,
        CHANNELS, KERNEL, TAP_STRIDE, CHANNEL_STRIDE,
    )  # fmt: skip
    v_window, v_taps = conv_window(
        x_row, ring_row, weight, v_channels[None], is_value[None], lags[:, None], phase,
        CHANNELS, KERNEL, TAP_STRIDE, CHANNEL_STRIDE,
    )  # fmt: skip
    return q_window, q_taps, k_window, k_taps, v_window, v_taps


@triton.jit
def convolve(window, taps, bias, channels, mask, HAS_BIAS: tl.constexpr):
    """silu(window . taps + bias) over the first axis, rounded to the dtype of the window, as fp32."""
    y = tl.sum(window.to(tl.float32) * taps.to(tl.float32), 0)
    if HAS_BIAS:
        y += tl.load(bias + channels, mask=mask, other=0.0).to(tl.float32)
    return (y * sigmoid(y)).to(window.dtype).to(tl.float32)


@triton.jit
def convolve_head(
    q_window,
    q_taps,
    k_window,
    k_taps,
    v_window,
    v_taps,
    bias,
    column,
    head,
    keys,
    is_key,
    values,
    is_value,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LAGS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """q, k and v of a head, fp32, from its windows, whose inputs at lag 0 go into the ring's column."""
    q_channels, k_channels, v_channels = head_channels(head, keys, values, HK, HV, K, V)
    q = convolve(q_window, q_taps, bias, q_channels, is_key, HAS_BIAS)
    k = convolve(k_window, k_taps, bias, k_channels, is_key, HAS_BIAS)
    v = convolve(v_window, v_taps, bias, v_channels, is_value, HAS_BIAS)
    lags = tl.arange(0, LAGS)
    # the first of the value heads that share a key head writes its q and k
    is_writer = is_key[None] & (keys[None] * 0 + head % (HV // HK) == 0)
    _keep_input(column, q_channels[None], q_window, lags[:, None, None], is_writer)
    _keep_input(column, k_channels[None], k_window, lags[:, None, None], is_writer)
    _keep_input(column, v_channels[None], v_window, lags[:, None], is_value[None])
    return q, k, v


@triton.jit
def _keep_input(column, channels, window, lag, mask):
    """Put the token's inputs, lag 0 of a window, into its column of the ring."""
    tl.store(column + channels + lag * 0, window, mask=mask & (lag == 0))


@triton.jit
def gates(a, b, A_log, dt_bias, head):
    """-exp(A_log) softplus(a + dt_bias) and sigmoid(b) of one head, from pointers to its a and b."""
    x = tl.load(a).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    g = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x)
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


def step_arguments(
    qkv: torch.Tensor,
    z: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> dict[str, object]:
    """The keyword arguments that both kernels take of a step (as in `gdn_decode_fused`), checked."""
    batch = qkv.shape[0]
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    assert qkv.shape[1] == conv_weight.shape[0] == channels and num_v_heads % num_k_heads == 0
    assert z.shape == (batch, num_v_heads * head_v_dim) and a.shape == b.shape == (batch, num_v_heads)
    assert state.shape[1:] == (num_v_heads, head_v_dim, head_k_dim) and state[0].is_contiguous()
    assert conv_state.shape[1:] == (conv_weight.shape[1], channels) and conv_state[0].is_contiguous()
    assert all(x.stride(1) == 1 for x in (qkv, z, a, b))
    block_k, block_v, num_warps = head_blocks(head_k_dim, head_v_dim)
    return {
        "qkv": qkv,
        "z": z,
        "a": a,
        "b": b,
        "conv_weight": conv_weight,
        "conv_bias": conv_weight if conv_bias is None else conv_bias,
        "conv_state": conv_state,
        "state": state,
        "scale": head_k_dim**-0.5,
        "qkv_stride": qkv.stride(0),
        "z_stride": z.stride(0),
        "a_stride": a.stride(0),
        "b_stride": b.stride(0),
        "conv_stride": conv_state.stride(0),
        "state_stride": state.stride(0),
        "HK": num_k_heads,
        "HV": num_v_heads,
        "K": head_k_dim,
        "V": head_v_dim,
        "KERNEL": conv_weight.shape[1],
        "LAGS": triton.next_power_of_2(conv_weight.shape[1]),
        "TAP_STRIDE": conv_weight.stride(1),
        "CHANNEL_STRIDE": conv_weight.stride(0),
        "HAS_BIAS": conv_bias is not None,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "num_warps": num_warps,
    }
