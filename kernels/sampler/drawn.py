"""Feeding a step with what the step before it drew, without asking the host."""

import torch


def take_drawn(token_ids: torch.Tensor, drawn: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """The token of each position: `drawn[sources]` where that is not negative, else `token_ids`.

    token_ids, sources: int64 [T]. drawn: int64 [R], ids drawn by the step before. Returns int64 [T].
    """
    if token_ids.is_cuda:
        from hybridserve.kernels.sampler import triton_drawn

        return triton_drawn.take_drawn(token_ids, drawn, sources)
    return torch.where(sources >= 0, drawn[sources.clamp(min=0)], token_ids)


def keep_drawn(tokens: torch.Tensor, finite: torch.Tensor, kept: torch.Tensor) -> None:
    """Put a step's draws where the next step and the host look for them.

    tokens: int64 [R]. finite: bool [R]. kept: int64 [2, at least R], takes tokens and then 0 or 1.
    """
    if tokens.is_cuda:
        from hybridserve.kernels.sampler import triton_drawn

        triton_drawn.keep_drawn(tokens, finite, kept)
        return
    kept[0, : tokens.shape[0]] = tokens
    kept[1, : tokens.shape[0]] = finite
