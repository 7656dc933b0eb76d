"""Products of one to four tokens with a weight, without tensor cores: one program a few rows of the weight.

Owns how the weight streams. Every program loads its first tile of the weight before it waits for the kernel
that writes x, so with programmatic dependent launch the memory is busy while that kernel drains. Knows
nothing of layers, nor which form is the faster one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_TOKENS = 4


@dataclass(frozen=True)
class GemvTile:
    """What one program computes: `rows` rows of the weight, `columns` of them at a time."""

    rows: int = 4
    columns: int = 2048
    num_warps: int = 4


@triton.jit
def _token_sum(x_ptr, token, num_tokens, x_stride, norm_ptr, weight, squares, cols, inside, NORMED: tl.constexpr):
    """One token's product with a tile of the weight and its sum of squares, both summed over 8 columns."""
    ROWS: tl.constexpr = weight.shape[0]
    COLS: tl.constexpr = weight.shape[1]
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + cols, inside & (token < num_tokens), other=0.0)
    x = x.to(tl.float32)
    if NORMED:
        squares += tl.sum(tl.reshape(x * x, [COLS // 8, 8]), 1)
        x *= tl.load(norm_ptr + cols, inside, other=0.0).to(tl.float32)
    # summed inside a thread, whose columns are 8 neighbours
    return tl.sum(tl.reshape(weight * x[None, :], [ROWS, COLS // 8, 8]), 2), squares


@triton.jit
def _finish(
    sums,
    squares,
    token,
    num_tokens,
    bias_ptr,
    residual_ptr,
    residual_stride,
    out_ptr,
    rows,
    N,
    K,
    eps,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORMED: tl.constexpr,
):
    y = tl.sum(sums, 1)
    if NORMED:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [y.shape[0] // 2, 2]))
        y = gate / (1 + tl.exp(-gate)) * up
    mask = (rows < N) & (token < num_tokens)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, rows < N, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + token.to(tl.int64) * residual_stride + rows, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + rows, y.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_tokens", "N"])
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    num_tokens,
    N,
    K,
    eps,
    x_stride,
    weight_stride,
    residual_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
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
    sums0 = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    sums1 = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    sums2 = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    sums3 = tl.zeros([ROWS, BLOCK_K // 8], tl.float32)
    squares0 = tl.zeros([BLOCK_K // 8], tl.float32)
    squares1 = tl.zeros([BLOCK_K // 8], tl.float32)
    squares2 = tl.zeros([BLOCK_K // 8], tl.float32)
    squares3 = tl.zeros([BLOCK_K // 8], tl.float32)
    token = tl.program_id(0) * 0
    for k in range(0, K, BLOCK_K):
        weight = ahead.to(tl.float32)
        ahead = tl.load(
            at + k + BLOCK_K,
            row_mask & (k + BLOCK_K + cols < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        inside = k + cols < K
        s, squares0 = _token_sum(
            x_ptr, token, num_tokens, x_stride, norm_ptr, weight, squares0, k + cols, inside, NORMED
        )
        sums0 += s
        if TOKENS > 1:
            s, squares1 = _token_sum(
                x_ptr, token + 1, num_tokens, x_stride, norm_ptr, weight, squares1, k + cols, inside, NORMED
            )
            sums1 += s
        if TOKENS > 2:
            s, squares2 = _token_sum(
                x_ptr, token + 2, num_tokens, x_stride, norm_ptr, weight, squares2, k + cols, inside, NORMED
            )
            sums2 += s
            s, squares3 = _token_sum(
                x_ptr, token + 3, num_tokens, x_stride, norm_ptr, weight, squares3, k + cols, inside, NORMED
            )
            sums3 += s
    rows = tl.program_id(0) * outputs + tl.arange(0, outputs)
    for i in tl.static_range(TOKENS):
        if i == 0:
            sums, squares = sums0, squares0
        elif i == 1:
            sums, squares = sums1, squares1
        elif i == 2:
            sums, squares = sums2, squares2
        else:
            sums, squares = sums3, squares3
        _finish(
            sums,
            squares,
            token + i,
            num_tokens,
            bias_ptr,
            residual_ptr,
            residual_stride,
            out_ptr,
            rows,
            N,
            K,
            eps,
            GATED,
            HAS_BIAS,
            HAS_RESIDUAL,
            NORMED,
        )


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    dependent: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: GemvTile | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual) of 1 to 4 tokens, computed in fp32 and rounded once.

    x: [T, K], rows dense. weight: [N, K] with dense rows. bias: [N]. residual: [T, N], rows dense.
    norm_weight: [K]; x is normed by its root mean square first (plain weight, `eps`) and not rounded between.
    gated: weight is [2N, K], gate first; the result is silu(gate) * up.
    dependent: launch before the kernel ahead in the stream has ended (programmatic dependent launch).
    Returns [T, N] in `out_dtype`, that of x by default.
    """
    tokens, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, n, dtype=out_dtype or x.dtype, device=x.device)
    tile = tile or GemvTile()
    if not tokens:
        return out
    block = min(tile.columns, max(16, triton.next_power_of_2(k)))
    options = {"launch_pdl": True} if dependent else {}
    _gemv_kernel[(triton.cdiv(n, tile.rows // 2 if gated else tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        out,
        tokens,
        n,
        k,
        eps,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        TOKENS=triton.next_power_of_2(tokens),
        ROWS=tile.rows,
        BLOCK_K=block,
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NORMED=norm_weight is not None,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        **options,
    )
    return out
