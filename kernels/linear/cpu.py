"""Products with a weight in plain PyTorch: the CPU's path, and a GPU's where its library is faster."""

import torch
import torch.nn.functional as F

from hybridserve.kernels.activation import silu_and_mul


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    consume_residual: bool = False,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual); with `consume_residual` the sum is written into `residual`."""
    if residual is None:
        return F.linear(x, weight, bias)
    # out of place, addmm copies the residual first: 1.5 us at 64 tokens
    y = residual.addmm_(x, weight.t()) if consume_residual else torch.addmm(residual, x, weight.t())
    return y if bias is None else y.add_(bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T), where weight [2I, K] is G over U. Returns [T, I]."""
    return silu_and_mul(F.linear(x, weight))


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T in fp32, into `out` where that is given."""
    if x.is_cuda and x.dtype != torch.float32:
        # the sums are fp32 inside: rounding them to the model's dtype would only make equal results
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    y = F.linear(x, weight).float()
    return y if out is None else out.copy_(y)
