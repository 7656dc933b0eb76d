"""Gates on the GPU, one launch each: silu(gate) * up of an MLP, x * sigmoid(gate) of an attention output.

Computes in fp32 and rounds once. Knows nothing of layers.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _gate_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    gate = tl.load(gate_ptr + token * gate_stride + cols, mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + cols, mask, other=0.0).to(tl.float32)
    factor = 1 / (1 + tl.exp(-gate))
    if SILU:
        factor *= gate
    tl.store(out_ptr + token * SIZE + cols, (x * factor).to(out_ptr.dtype.element_ty), mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first, the last axis dense -> silu(gate) * up, [T, I] in its dtype."""
    gate, up = gate_up.chunk(2, -1)
    return _launch(up, gate, silu=True)


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate): both [T, C] with the last axis dense, in one dtype. Returns [T, C], contiguous."""
    assert x.shape == gate.shape and x.dtype == gate.dtype
    return _launch(x, gate, silu=False)


def _launch(x: torch.Tensor, gate: torch.Tensor, silu: bool) -> torch.Tensor:
    assert x.ndim == 2 and x.stride(1) == gate.stride(1) == 1
    tokens, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(size))
    if tokens:
        _gate_kernel[(tokens * triton.cdiv(size, block),)](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            SIZE=size,
            BLOCK=block,
            SILU=silu,
            num_warps=4,
        )
    return out
