"""From logits to tokens: penalties, filters, the draw, logprobs, and the random numbers.

These run where their tensors are; `sample` in plain PyTorch on a GPU too. What a GPU can do in fewer passes
(a finite flag beside the tokens, the draw, edits of a whole batch) is in triton_greedy, triton_sample and
triton_penalties.
"""

import torch

from hybridserve.kernels.sampler import cpu
from hybridserve.kernels.sampler.cpu import penalize, sample
from hybridserve.kernels.sampler.random import draw_key

__all__ = ["draw_key", "penalize", "rows_finite", "sample", "token_logprobs"]


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of given and of the likeliest tokens: see `cpu.token_logprobs`."""
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_logprobs

        return triton_logprobs.token_logprobs(logits, token_ids, num_top)
    return cpu.token_logprobs(logits, token_ids, num_top)


def rows_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [R]: whether a row of logits [R, V] is free of NaN and infinities."""
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_greedy

        return triton_greedy.greedy(logits)[1]
    return cpu.rows_finite(logits)
