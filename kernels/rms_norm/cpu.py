"""Root-mean-square norms on the CPU: computed in fp32, returned in the dtype of the input."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> torch.Tensor:
    """x [..., D] normalised over D and multiplied by 1 + weight (`zero_centered`) or by weight [D]."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    weight = weight.float()
    out = torch.addcmul(normed, normed, weight) if zero_centered else normed.mul_(weight)
    return out.to(x.dtype)


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(x) and then * silu(gate): x, gate [..., D], weight [D] plain. In the dtype of x."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return normed.mul_(F.silu(gate.float())).to(x.dtype)
