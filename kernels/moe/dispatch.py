"""Mixture of experts where its input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.moe import cpu


def moe_route(
    logits: torch.Tensor,
    num_experts: int,
    top_k: int,
    *,
    normalize: bool,
    row_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts each token goes to, and with what weights.

    logits: [T, W], the last axis dense: of the experts in the first `num_experts` columns, of the shared
        expert's gate in the next; further columns are ignored.
    normalize: whether the chosen experts' softmax weights are divided by their sum.
    row_index: [T] integers; rows where it is negative are padding. None: there is none.
    Returns weights fp32 [T, top_k + 1] and ids int32 [T, top_k + 1]: the top experts by falling logit, of
    equal ones the lower id first, with softmax weights over all experts; last the shared expert, whose id is
    `num_experts`, with the sigmoid of its gate. Rows of padding have weights 0 and ids -1.
    """
    if logits.is_cuda:
        from hybridserve.kernels.moe import triton_route

        return triton_route.moe_route(logits, num_experts, top_k, normalize=normalize, row_index=row_index)
    return cpu.moe_route(logits, num_experts, top_k, normalize=normalize, row_index=row_index)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + sum over slots of weights * w2[id] (silu(gate) * up), where gate | up = w13[id] x.

    x, residual: [T, H] of one dtype. w13: [E, 2 * I, H], gate rows first; w2: [E, H, I]; contiguous, in the
    dtype of x. weights: fp32 [T, S]; ids: int32 [T, S] in [0, E), or -1 for none; no id twice in a row.
    Products accumulate in fp32; silu(gate) * up is rounded to the dtype of x. Returns [T, H] in it.
    """
    if x.is_cuda:
        from hybridserve.kernels.moe import triton_experts

        return triton_experts.moe_experts(x, w13, w2, weights, ids, residual)
    return cpu.moe_experts(x, w13, w2, weights, ids, residual)
