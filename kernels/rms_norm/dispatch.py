"""Norms where their input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.rms_norm import cpu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True, dependent: bool = False
) -> torch.Tensor:
    """x [..., D] normalised over D and multiplied by 1 + weight (`zero_centered`) or by weight [D].

    Computed in fp32, returned in the dtype of x. dependent: on a GPU the launch may begin before the kernels
    ahead of it in the stream have ended; the weight must have been complete before those were launched.
    """
    if x.is_cuda:
        from hybridserve.kernels.rms_norm import triton_norm

        return triton_norm.rms_norm(x, weight, eps, zero_centered=zero_centered, dependent=dependent)
    return cpu.rms_norm(x, weight, eps, zero_centered=zero_centered)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(h), h) with h = x + residual, rounded to their dtype before it is normed."""
    if x.is_cuda:
        from hybridserve.kernels.rms_norm import triton_norm

        return triton_norm.rms_norm_residual(x, residual, weight, eps, zero_centered=zero_centered)
    return cpu.rms_norm_residual(x, residual, weight, eps, zero_centered=zero_centered)


def rms_norm_gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * norm(x) and then * silu(gate): x, gate [..., D], weight [D] plain. In the dtype of x."""
    if x.is_cuda:
        from hybridserve.kernels.rms_norm import triton_norm

        return triton_norm.rms_norm_gated(x, gate, weight, eps)
    return cpu.rms_norm_gated(x, gate, weight, eps)
