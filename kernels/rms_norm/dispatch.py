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


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """fp32 [...] of x [..., D], over D: what ranks that hold parts of D add up before a norm."""
    if x.is_cuda:
        from hybridserve.kernels.rms_norm import triton_norm_given

        return triton_norm_given.sum_of_squares(x)
    return cpu.sum_of_squares(x)


def rms_norm_gated_given(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    squares: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """`rms_norm_gated` of some channels of rows that have `size` of them, of which others are elsewhere.

    x, gate: [T, heads, D], of the same channels as weight [D]. squares: fp32 [T, heads], the sums of squares
    over all `size` channels.
    """
    if x.is_cuda:
        from hybridserve.kernels.rms_norm import triton_norm_given

        return triton_norm_given.rms_norm_gated_given(x, gate, weight, eps, squares, size)
    return cpu.rms_norm_gated_given(x, gate, weight, eps, squares, size)
