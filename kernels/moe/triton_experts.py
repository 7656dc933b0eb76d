"""Which form of the experts' kernels computes a batch on the GPU."""

import torch

from hybridserve.kernels.moe.triton_direct import moe_experts_direct
from hybridserve.kernels.moe.triton_grouped import moe_experts_grouped

MAX_DIRECT_TOKENS = 8


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `dispatch.moe_experts`: without a sort for up to 8 tokens, grouped by expert for more."""
    check(x, w13, w2, weights, ids, residual)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    form = moe_experts_direct if x.shape[0] <= MAX_DIRECT_TOKENS else moe_experts_grouped
    return form(x, w13, w2, weights, ids, residual)


def check(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and layouts that the kernels rely on."""
    experts, hidden, size = w2.shape
    assert w13.shape == (experts, 2 * size, hidden) and w13.is_contiguous() and w2.is_contiguous()
    assert x.shape[1] == hidden and x.stride(1) == 1 and x.dtype == w13.dtype == w2.dtype
    assert weights.shape == ids.shape and weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert weights.is_contiguous() and ids.is_contiguous() and ids.shape[0] == x.shape[0]
    if residual is not None:
        assert residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype
