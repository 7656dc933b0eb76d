"""The truth of the fused sums: plain PyTorch in the ranks' order."""

import torch


def all_reduce_reference(
    inputs: list[torch.Tensor],
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """inputs: one [T, D] a rank. residual: [T, D]. weight: [D], plain.

    Returns (sum of inputs and residual, that sum normalised over D and multiplied by `weight`, or None),
    computed in the inputs' dtype, so that fp64 inputs give the truth.
    """
    total = inputs[0].clone()
    for x in inputs[1:]:
        total += x
    if residual is not None:
        total += residual
    if weight is None:
        return total, None
    return total, total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
