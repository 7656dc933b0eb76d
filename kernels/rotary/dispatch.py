"""Rotary angles where the positions lie: Triton's kernel on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.rotary import cpu


def rotary_cos_sin(
    positions: torch.Tensor, rotary_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T] -> (cos, sin), fp32 [T, rotary_dim // 2], of fp32 angles."""
    if positions.is_cuda:
        from hybridserve.kernels.rotary import triton_qk

        return triton_qk.rotary_cos_sin(positions, rotary_dim, theta)
    return cpu.rotary_cos_sin(positions, rotary_dim, theta)
