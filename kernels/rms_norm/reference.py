"""Root-mean-square norms written out: the truth the fast paths are tested against, in the dtype given."""

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times (1 + weight) or weight. x [..., D], weight [D]."""
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed * (1 + weight if zero_centered else weight)


def rms_norm_gated_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The norm first, with a plain weight, and then the gate: weight * norm(x) * silu(gate). All [..., D]."""
    return rms_norm_reference(x, weight, eps, zero_centered=False) * gate / (1 + torch.exp(-gate))
