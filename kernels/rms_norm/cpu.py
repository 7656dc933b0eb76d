"""Root-mean-square norms on the CPU: computed in fp32, returned in the dtype of the input."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> torch.Tensor:
    """x [..., D] normalised over D and multiplied by 1 + weight (`zero_centered`) or by weight [D]."""
    normed = _normalise(x.float(), eps)
    weight = weight.float()
    out = torch.addcmul(normed, normed, weight) if zero_centered else normed.mul_(weight)
    return out.to(x.dtype)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(h), h) with h = x + residual, rounded to their dtype before it is normed."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered), total


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(x) and then * silu(gate): x, gate [..., D], weight [D] plain. In the dtype of x."""
    normed = _normalise(x.float(), eps).mul_(weight.float())
    return normed.mul_(F.silu(gate.float())).to(x.dtype)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """fp32 [...] of x [..., D], over D."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square_()


def rms_norm_gated_given(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    squares: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """`rms_norm_gated` of some channels of rows whose sums of squares over all `size` are given."""
    scale = squares.mul(1 / size).add_(eps).rsqrt_().unsqueeze(-1)
    normed = (x.float() * scale).mul_(weight.float())
    return normed.mul_(F.silu(gate.float())).to(x.dtype)


def _normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) of fp32 x. Through the vector norm: F.rms_norm is composite on a CPU, and its
    operations on rows of one token took twice as long."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
