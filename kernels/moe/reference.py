"""Mixture of experts written out, token by token: the truth the fast forms are tested against."""

import torch


def moe_route_reference(
    logits: torch.Tensor, num_experts: int, top_k: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.moe_route` without padding, weights in the dtype of logits [T, W]."""
    rows = []
    for row in logits:
        routed = row[:num_experts]
        probabilities = (routed - routed.max()).exp()
        probabilities = probabilities / probabilities.sum()
        order = sorted(range(num_experts), key=lambda e: (-routed[e].item(), e))[:top_k]
        chosen = probabilities[order]
        if normalize:
            chosen = chosen / chosen.sum()
        shared = 1 / (1 + (-row[num_experts]).exp())
        rows.append((torch.cat([chosen, shared[None]]), torch.tensor([*order, num_experts])))
    weights, ids = zip(*rows, strict=True)
    return torch.stack(weights), torch.stack(ids).to(logits.device, torch.int32)


def moe_experts_reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `dispatch.moe_experts`, in the dtype of x, whatever that of w13 and w2, and without rounding in
    between."""
    out = torch.zeros_like(x) if residual is None else residual.clone()
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                gate, up = (w13[expert].to(x.dtype) @ x[token]).chunk(2)
                act = gate / (1 + torch.exp(-gate)) * up
                out[token] += weights[token, slot] * (w2[expert].to(x.dtype) @ act)
    return out
