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
    state_tile,
    store_masked,
)
from hybridserve.kernels.linear_attention.triton_gdn_parts import (
    convolve_head,
    gates,
    head_windows,
    key_products,
    norm_and_gate,
    step_arguments,
)


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
    NORMED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    MASKED: tl.constexpr = BLOCK_K != K or BLOCK_V != V
    CHANNELS: tl.constexpr = 2 * HK * K + HV * V
    row = (tl.program_id(0) // HV).to(tl.int64)
    head = tl.program_id(0) % HV
    values = tl.arange(0, BLOCK_V)
    is_value = values < V
    out_pointers = out + row * HV * V + head * V + values
    index = tl.load(state_indices + row)
    position = tl.load(positions + row)
    # asked together, or the compiler would load the position only once the index is there
    if tl.minimum(index, position) < 0:
        store_masked(out_pointers, tl.zeros([BLOCK_V], tl.float32), is_value, MASKED)
        return

    phase = (position % KERNEL).to(tl.int32)
    state_row = state + index * state_stride + head * V * K
    # what q, k and v are made of is loaded first: they are ready by the time the state is
    keys, is_key = key_tile(K, BLOCK_K)
    x_row = qkv + row * qkv_stride
    ring_row = conv_state + index * conv_stride
    q_window, q_taps, k_window, k_taps, v_window, v_taps = head_windows(
        x_row, ring_row, conv_weight, head, keys, is_key, values, is_value, phase,
        HK, HV, K, V, KERNEL, LAGS, TAP_STRIDE, CHANNEL_STRIDE,
    )  # fmt: skip
    g, beta = gates(a + row * a_stride + head, b + row * b_stride + head, A_log, dt_bias, head)

    q, k, v = convolve_head(
        q_window, q_taps, k_window, k_taps, v_window, v_taps, conv_bias, ring_row + phase * CHANNELS,
        head, keys, is_key, values, is_value, HK, HV, K, V, LAGS, HAS_BIAS,
    )  # fmt: skip
    offsets, in_state = state_tile(keys, values, K, V)
    tile = load_masked(state_row + offsets, in_state, MASKED)
    if NORMED:
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
    if NORMED:
        o = norm_and_gate(o, z_vector, weight, eps, V)
    store_masked(out_pointers, o, is_value, MASKED)


def gdn_decode_fused(
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
    state_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `dispatch.gdn_decode_fused`. One launch, which a CUDA graph can hold; state in fp32 or bf16."""
    step = step_arguments(
        qkv, z, a, b, conv_weight, conv_bias, conv_state, state,
        num_k_heads, num_v_heads, head_k_dim, head_v_dim,
    )  # fmt: skip
    if out is None:
        out = torch.empty(z.shape, dtype=qkv.dtype, device=qkv.device)
    assert out.shape == z.shape and out.dtype == qkv.dtype and out.is_contiguous()
    if out.shape[0] == 0:
        return out
    _gdn_decode_kernel[(out.shape[0] * num_v_heads,)](
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=qkv if norm_weight is None else norm_weight,
        NORMED=norm_weight is not None,
        eps=eps,
        state_indices=state_indices,
        positions=positions,
        out=out,
        **step,
    )
    return out
