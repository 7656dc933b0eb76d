"""Products with a weight where their input lies: a GPU's fastest form, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.linear import cpu


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    consume_residual: bool = False,
    dependent: bool = False,
    read_ahead: bool = False,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual), summed in fp32 on a GPU. A row of the result depends on no other row of x.

    x: [T, K]. weight: [N, K]. bias: [N]. residual: [T, N]. All of one dtype, last axes dense.
    out: [T, N] to write to. out_dtype: that of x, or fp32. Both exclude bias and residual.
    consume_residual: the residual is not needed afterwards and may be overwritten, even be what is returned.
    dependent: a decode product may read its weight before the kernels ahead of it in the stream have ended
        (programmatic dependent launch). For weights that were complete before those kernels were launched.
    read_ahead: the kernel ahead waits more than it reads memory, so a dependent product of several tokens
        has the first of its weight fetched meanwhile; one of a single token always does.

    Raises:
        ValueError: shapes or dtypes do not match, or bias or residual comes with `out` or `out_dtype`.
    """
    rows = weight.shape[0]
    _check(x, weight, bias, residual, out)
    if (out_dtype is not None or out is not None) and (bias is not None or residual is not None):
        raise ValueError(f"out and out_dtype take neither bias nor residual, got out_dtype={out_dtype}")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype must be that of x ({x.dtype}) or torch.float32, got {out_dtype}")
    if out is not None and out.dtype != (out_dtype or x.dtype):
        raise ValueError(f"out must be {out_dtype or x.dtype}, got {out.dtype}")
    if x.is_cuda:
        from hybridserve.kernels.linear import choice, triton_gemv, triton_skinny

        if choice.takes_triton(x, weight):
            if out is None:
                out = torch.empty(x.shape[0], rows, dtype=out_dtype or x.dtype, device=x.device)
            added = {"bias": bias, "residual": residual, "dependent": dependent}
            if x.shape[0] == 1:
                triton_gemv.gemv(x, weight, out, **added)
            else:
                tile = choice.skinny_tile(*weight.shape)
                triton_skinny.skinny(x, weight, out, **added, read_ahead=read_ahead, tile=tile)
            return out
    if out_dtype == torch.float32:
        return cpu.linear_fp32(x, weight, out)
    if out is not None:
        return torch.mm(x, weight.t(), out=out)
    return cpu.linear(x, weight, bias, residual, consume_residual=consume_residual)


def linear_silu_and_mul(
    x: torch.Tensor, weight: torch.Tensor, *, dependent: bool = False, read_ahead: bool = False
) -> torch.Tensor:
    """silu(x G^T) * (x U^T), where weight [2I, K] is G over U: [T, K] -> [T, I].

    dependent, read_ahead: as in `linear`.

    Raises:
        ValueError: shapes do not match, or the weight has an odd number of rows.
    """
    _check(x, weight, None, None, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must hold as many rows of gate as of up, got {weight.shape[0]} rows")
    if x.is_cuda:
        from hybridserve.kernels.linear import choice, triton_gemv, triton_skinny

        if choice.takes_triton(x, weight):
            rows = weight.shape[0] // 2
            out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
            how = {"gated": True, "dependent": dependent}
            if x.shape[0] == 1:
                triton_gemv.gemv(x, weight, out, **how)
            else:
                tile = choice.gated_tile(rows)
                triton_skinny.skinny(x, weight, out, **how, read_ahead=read_ahead, tile=tile)
            return out
    return cpu.linear_silu_and_mul(x, weight)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [T, K] and [N, K]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    wanted = (x.shape[0], weight.shape[0])
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
