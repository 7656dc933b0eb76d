"""The causal convolution of one token a sequence on the GPU, in one launch, in place on the rings."""

import torch
import triton
import triton.language as tl

MAX_BLOCK_C = 512


@triton.jit(do_not_specialize_on_alignment=["state_indices_ptr", "positions_ptr"])
def _conv_decode_kernel(
    x_ptr,
    phase_weight_ptr,
    bias_ptr,
    ring_ptr,
    out_ptr,
    state_indices_ptr,
    positions_ptr,
    x_stride,
    ring_stride_n,
    ring_stride_k,
    C: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channels = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channels < C
    unit = tl.load(state_indices_ptr + row)
    acc = tl.zeros([BLOCK_C], dtype=tl.float32)
    if unit >= 0:
        phase = tl.load(positions_ptr + row) % KERNEL
        ring = ring_ptr + unit * ring_stride_n + channels
        weights = phase_weight_ptr + phase * KERNEL * C + channels
        x = tl.load(x_ptr + row * x_stride + channels, mask, other=0.0)
        acc = x.to(tl.float32) * tl.load(weights + phase * C, mask, other=0.0)
        # by age, as the prefill adds them
        for lag in tl.static_range(1, KERNEL):
            column = (phase + KERNEL - lag) % KERNEL
            value = tl.load(ring + column * ring_stride_k, mask, other=0.0).to(tl.float32)
            acc += value * tl.load(weights + column * C, mask, other=0.0)
        tl.store(ring + phase * ring_stride_k, x.to(ring_ptr.dtype.element_ty), mask)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + channels, mask, other=0.0).to(tl.float32)
        acc = acc / (1 + tl.exp(-acc))
    tl.store(out_ptr + row * C + channels, acc.to(out_ptr.dtype.element_ty), mask)


def causal_conv1d_decode(
    x: torch.Tensor,
    phase_weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token of each of B sequences.

    x: [B, C], the last axis dense. bias: [C] or None.
    phase_weight: fp32 [kernel, kernel, C] of `make_phase_weight`.
    conv_state: [N, kernel, C] rings, the last axis dense; rows `state_indices` (int64 [B], distinct where not
        negative) take x in place. A negative index stands for no sequence: its output is zero.
    positions: int64 [B], position of each token in its sequence.
    Returns silu(conv(x) + bias), [B, C] in the dtype of x. Capturable in a CUDA graph.
    """
    batch, channels = x.shape
    kernel = phase_weight.shape[0]
    assert x.stride(1) == conv_state.stride(2) == 1 and phase_weight.is_contiguous()
    assert phase_weight.shape[1:] == conv_state.shape[1:] == (kernel, channels)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(MAX_BLOCK_C, triton.next_power_of_2(channels))
    if batch:
        _conv_decode_kernel[(batch * triton.cdiv(channels, block),)](
            x,
            phase_weight,
            x if bias is None else bias,
            conv_state,
            out,
            state_indices,
            positions,
            x.stride(0),
            *conv_state.stride()[:2],
            C=channels,
            KERNEL=kernel,
            BLOCK_C=block,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )
    return out
