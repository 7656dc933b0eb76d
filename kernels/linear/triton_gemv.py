"""The product of one token with a weight, without tensor cores: one program a few rows of the weight.

Owns how the weight streams. Every program loads its first tile before it waits for the kernel that writes x,
so with programmatic dependent launch the memory is busy while that kernel drains. Knows nothing of layers,
nor for which shapes this form is the faster one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class GemvTile:
    """What one program computes: `rows` rows of the weight, `columns` of them at a time."""

    rows: int = 8
    columns: int = 1024
    num_warps: int = 4


@triton.jit(do_not_specialize=["N"])
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    K,
    weight_stride,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        # at once: thousands of programs follow one another, so the next kernel's first ones fill the gaps
        tl.extra.cuda.gdc_launch_dependents()
    tile_rows = tl.arange(0, ROWS)
    if GATED:
        # rows of gate and of up in turn, so that a pair is split off at the end
        outputs: tl.constexpr = ROWS // 2
        row = tl.program_id(0) * outputs + tile_rows // 2
        weight_row = row + (tile_rows % 2) * N
    else:
        outputs: tl.constexpr = ROWS
        row = tl.program_id(0) * outputs + tile_rows
        weight_row = row
    cols = tl.arange(0, BLOCK_K)
    at = weight_ptr + weight_row.to(tl.int64)[:, None] * weight_stride + cols[None, :]
    row_mask = (row < N)[:, None]
    ahead = tl.load(at, row_mask & (cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    for k in range(0, K, BLOCK_K):
        weight = ahead
        mask = row_mask & (k + BLOCK_K + cols < K)[None, :]
        ahead = tl.load(at + k + BLOCK_K, mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + k + cols, k + cols < K, other=0.0).to(tl.float32)
        # summed inside a thread first, whose columns are 8 neighbours
        sums += tl.sum(tl.reshape(weight.to(tl.float32) * x[None, :], [ROWS, BLOCK_K // 8, 8]), 2)
    y = tl.sum(sums, 1)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [outputs, 2]))
        y = gate / (1 + tl.exp(-gate)) * up
    rows = tl.program_id(0) * outputs + tl.arange(0, outputs)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, rows < N, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, rows < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), rows < N)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool = False,
    tile: GemvTile | None = None,
) -> None:
    """out = x W^T (+ bias) (+ residual) of one token, computed in fp32 and rounded once.

    x: [1, K]. weight: [N, K]. bias: [N]. residual, out: [1, N]. Last axes dense; out in any float dtype.
    gated: weight is [2N, K], rows of gate first, and out = silu(gate) * up.
    dependent: launch before the kernel ahead in the stream has ended (programmatic dependent launch).
    """
    rows, k = out.shape[1], x.shape[1]
    assert x.shape[0] == out.shape[0] == 1 and weight.shape == ((2 if gated else 1) * rows, k)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    tile = tile or GemvTile()
    _gemv_kernel[(triton.cdiv(rows, tile.rows // 2 if gated else tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        k,
        weight.stride(0),
        ROWS=tile.rows,
        BLOCK_K=min(tile.columns, max(16, triton.next_power_of_2(k))),
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if dependent else {}),
    )
