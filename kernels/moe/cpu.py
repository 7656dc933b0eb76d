"""Mixture of experts in plain PyTorch: tokens are sorted by expert, and each expert computes its own at once.

Runs on a GPU too, where it waits for the host to learn how many tokens each expert has.
"""

import torch
import torch.nn.functional as F

from hybridserve.kernels.activation import silu_and_mul


def moe_route(
    logits: torch.Tensor,
    num_experts: int,
    top_k: int,
    *,
    normalize: bool,
    row_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.moe_route`."""
    routed = logits[:, :num_experts].float()
    # stable, so that of equal logits the lower id comes first
    best, ids = (x[:, :top_k] for x in torch.sort(routed, dim=-1, descending=True, stable=True))
    chosen = best.softmax(-1) if normalize else (best - routed.logsumexp(-1, keepdim=True)).exp()
    shared = logits[:, num_experts : num_experts + 1]
    weights = torch.cat([chosen, shared.float().sigmoid()], 1)
    ids = torch.cat([ids, torch.full_like(shared, num_experts, dtype=torch.int64)], 1)
    if row_index is not None:
        padding = (row_index < 0)[:, None]
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return weights, ids.to(torch.int32)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `dispatch.moe_experts`."""
    tokens, slots = ids.shape
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    # ids of -1 come first and belong to no expert
    counts = torch.bincount(flat + 1, minlength=w13.shape[0] + 1).tolist()
    y = x.new_zeros(tokens * slots, x.shape[1])
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            own = order[start : start + count]
            act = silu_and_mul(F.linear(x[own // slots], w13[expert]))
            y[own] = F.linear(act, w2[expert])
            start += count
    # slot by slot, so that a token's sum does not depend on the batch
    out = torch.zeros_like(x, dtype=torch.float32) if residual is None else residual.float()
    for slot in range(slots):
        part = y.view(tokens, slots, x.shape[1])[:, slot].float() * weights[:, slot : slot + 1]
        out = out + part.masked_fill((ids[:, slot] < 0)[:, None], 0.0)
    return out.to(x.dtype)
