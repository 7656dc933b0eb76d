"""Root-mean-square norms on the GPU, one launch each: alone, after a residual add, before a gate.

Owns how rows are dealt to programs. Computes in fp32 and rounds once. Knows nothing of layers.
"""

import torch
import triton
import triton.language as tl

MAX_DIM = 16384
# elements of one program: enough loads in flight for the memory, few enough for one row of a decode step
TILE = 2048


@triton.jit
def _rows_at(rows, heads: tl.constexpr, stride_t, stride_h):
    """Element offsets of rows numbered over [T, heads]."""
    tokens = (rows // heads).to(tl.int64)
    return tokens * stride_t + (rows % heads).to(tl.int64) * stride_h


@triton.jit
def _normalise(x, eps, D: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    eps,
    x_stride_t,
    x_stride_h,
    residual_stride_t,
    residual_stride_h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    x_at = _rows_at(rows, HEADS, x_stride_t, x_stride_h)[:, None] + cols[None, :]
    out_at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)[None, :]
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + x_at, mask, other=0.0)
    if HAS_RESIDUAL:
        residual_at = _rows_at(rows, HEADS, residual_stride_t, residual_stride_h)[:, None] + cols[None, :]
        residual = tl.load(residual_ptr + residual_at, mask, other=0.0)
        # normed from the rounded sum, so that fused and unfused give the same bits
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out_at, x, mask)
    normed = _normalise(x.to(tl.float32), eps, D)
    out = normed * weight + normed if ZERO_CENTERED else normed * weight
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_gated_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    x_stride_t,
    x_stride_h,
    gate_stride_t,
    gate_stride_h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    x_at = _rows_at(rows, HEADS, x_stride_t, x_stride_h)[:, None] + cols[None, :]
    gate_at = _rows_at(rows, HEADS, gate_stride_t, gate_stride_h)[:, None] + cols[None, :]
    x = tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)[None, :]
    out = _normalise(x, eps, D) * weight * (gate / (1 + tl.exp(-gate)))
    out_at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True, dependent: bool = False
) -> torch.Tensor:
    """x [..., D] normalised over D and multiplied by 1 + weight (`zero_centered`) or by weight [D].

    x: bf16, fp16 or fp32, the last axis dense; beyond three axes contiguous. weight: any float dtype.
    dependent: launch before the kernel ahead in the stream has ended (programmatic dependent launch).
    Returns a contiguous tensor in the dtype of x, computed in fp32.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, eps, zero_centered, out, None, dependent)
    return out


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(h), h) with h = x + residual, rounded to their dtype before it is normed.

    x, residual: [..., D], as x in `rms_norm`. Neither is changed.
    """
    assert x.shape == residual.shape and x.dtype == residual.dtype
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, weight, eps, zero_centered, out, total)
    return out, total


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(x) and then * silu(gate): x, gate [..., D] as x in `rms_norm`, weight [D] plain."""
    assert x.shape == gate.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, gate = _as_heads(x, gate)
    dim = x.shape[2]
    block, rows, num_warps = _tile(dim)
    num_rows = x.shape[0] * x.shape[1]
    if num_rows:
        _rms_norm_gated_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            gate,
            weight,
            out,
            num_rows,
            eps,
            *x.stride()[:2],
            *gate.stride()[:2],
            HEADS=x.shape[1],
            D=dim,
            BLOCK_D=block,
            ROWS=rows,
            num_warps=num_warps,
        )
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    out: torch.Tensor,
    total: torch.Tensor | None,
    dependent: bool = False,
) -> None:
    x, added = _as_heads(x, x if residual is None else residual)
    dim = x.shape[2]
    block, rows, num_warps = _tile(dim)
    num_rows = x.shape[0] * x.shape[1]
    if not num_rows:
        return
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        added,
        weight,
        out,
        out if total is None else total,
        num_rows,
        eps,
        *x.stride()[:2],
        *added.stride()[:2],
        HEADS=x.shape[1],
        D=dim,
        BLOCK_D=block,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        ZERO_CENTERED=zero_centered,
        DEPENDENT=dependent,
        num_warps=num_warps,
        **({"launch_pdl": True} if dependent else {}),
    )


def _as_heads(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, of one shape, as [T, heads, D] without a copy; heads is 1 where all rows lie evenly."""
    assert x.stride(-1) == y.stride(-1) == 1 and x.shape[-1] <= MAX_DIM
    if x.is_contiguous() and y.is_contiguous():
        return x.view(-1, 1, x.shape[-1]), y.view(-1, 1, x.shape[-1])
    if x.ndim == 2:
        return x.unsqueeze(1), y.unsqueeze(1)
    assert x.ndim == 3, f"beyond three axes only contiguous tensors are taken, not {tuple(x.shape)}"
    return x, y


def _tile(dim: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program."""
    block = triton.next_power_of_2(dim)
    rows = max(1, TILE // block)
    return block, rows, 8 if block > 4096 else 4
