"""The gated norm on the GPU where a rank holds part of every row's channels: sums of squares, then the rest.

Between the two, the ranks add their sums up. Computes in fp32 and rounds once.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.rms_norm.triton_norm import _as_heads, _rows_at, _tile


@triton.jit(do_not_specialize=["num_rows"])
def _squares_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    x_stride_t,
    x_stride_h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    x_at = _rows_at(rows, HEADS, x_stride_t, x_stride_h)[:, None] + cols[None, :]
    x = tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, tl.sum(x * x, 1), rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_given_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    squares_ptr,
    out_ptr,
    num_rows,
    eps,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    squares_stride_t,
    squares_stride_h,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    x_at = _rows_at(rows, HEADS, x_stride_t, x_stride_h)[:, None] + cols[None, :]
    gate_at = _rows_at(rows, HEADS, gate_stride_t, gate_stride_h)[:, None] + cols[None, :]
    squares_at = _rows_at(rows, HEADS, squares_stride_t, squares_stride_h)
    x = tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)[None, :]
    squares = tl.load(squares_ptr + squares_at, rows < num_rows, other=0.0)
    normed = x * tl.rsqrt(squares / SIZE + eps)[:, None]
    out = normed * weight * (gate / (1 + tl.exp(-gate)))
    out_at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """fp32 [...] of x [..., D], over D; x as in `rms_norm`."""
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x, _ = _as_heads(x, x)
    dim = x.shape[2]
    block, rows, num_warps = _tile(dim)
    if out.numel():
        _squares_kernel[(triton.cdiv(out.numel(), rows),)](
            x,
            out,
            out.numel(),
            *x.stride()[:2],
            HEADS=x.shape[1],
            D=dim,
            BLOCK_D=block,
            ROWS=rows,
            num_warps=num_warps,
        )
    return out


def rms_norm_gated_given(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    squares: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """See the folder's `rms_norm_gated_given`; x and gate with a dense last axis, squares of any strides."""
    assert x.shape == gate.shape and x.ndim == 3 and squares.shape == x.shape[:2]
    assert x.stride(-1) == gate.stride(-1) == 1 and squares.dtype == torch.float32
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape
    block, rows, num_warps = _tile(dim)
    if x.numel():
        _gated_given_kernel[(triton.cdiv(tokens * heads, rows),)](
            x,
            gate,
            weight,
            squares,
            out,
            tokens * heads,
            eps,
            *x.stride()[:2],
            *gate.stride()[:2],
            *squares.stride(),
            HEADS=heads,
            SIZE=size,
            D=dim,
            BLOCK_D=block,
            ROWS=rows,
            num_warps=num_warps,
        )
    return out
