"""Rotary position embedding on the CPU (Su et al. 2021), dims paired with their half-way partners."""

import torch


def rotary_cos_sin(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T] -> (cos, sin), fp32 [T, rotary_dim // 2].

    The angles are fp32 products of position and fp32 frequency, as checkpoints were trained with; at large
    positions exact angles would differ from those.
    """
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [T, H, D], in fp32; the others pass. In the dtype of x."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat((turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * half :]), -1)
