"""Products with a weight written out: the truth the fast paths are tested against, in the dtype given."""

import torch


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t, n] = sum over k of x[t, k] weight[n, k], plus bias[n] and residual[t, n] where given."""
    y = (x[:, None, :] * weight).sum(-1)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def linear_silu_and_mul_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T), where weight [2I, K] is G over U. Returns [T, I]."""
    gate, up = linear_reference(x, weight).chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up
