"""From logits to tokens: penalties, biases, filters, the draw, logprobs, and the random numbers.

Each function takes the same arguments and returns the same thing on both devices: plain PyTorch on a CPU
(`cpu`, `cpu_batch`), Triton on a GPU, where a CUDA graph can hold all of them.
"""

from types import ModuleType

import torch

from hybridserve.kernels.sampler import cpu, cpu_batch
from hybridserve.kernels.sampler.drawn import keep_drawn, take_drawn
from hybridserve.kernels.sampler.random import draw_key

__all__ = [
    "bias_batch",
    "draw_key",
    "greedy",
    "keep_drawn",
    "penalize_batch",
    "rows_finite",
    "sample",
    "sample_seeded",
    "take_drawn",
    "token_logprobs",
]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of each row's largest logit, and whether the row is free of NaN and infinities.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous. Returns int64 [B] in [0, V) and bool [B]; the token
    of a row that is not finite means nothing.
    """
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_greedy

        return triton_greedy.greedy(logits)
    return cpu_batch.greedy(logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, and whether the row is free of NaN and infinities.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous. temperature, top_p, min_p: floating [B]; top_k:
        integer [B]. Temperature 0 is greedy (the lowest id of the largest logit); top_k <= 0, top_p >= 1 and
        min_p <= 0 are off.
    keys: int64 [B], of `draw_key`.
    Returns int64 [B] in [0, V) and bool [B]; the token of a row that is not finite means nothing. Filters and
    the draw are `cpu.sample`'s; the devices differ by the rounding that `triton_sample.sample` tells of.
    """
    return _sampling(logits).sample(logits, temperature, top_k, top_p, min_p, keys)


def sample_seeded(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` with the keys that `draw_key(seed, position)` gives, computed on the device.

    seeds: int64 [B], the seed modulo 2 ** 64 as two's complement. positions: int64 [B].
    """
    return _sampling(logits).sample_seeded(logits, temperature, top_k, top_p, min_p, seeds, positions)


def penalize_batch(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Apply penalties to logits [B, V] in place, from each row's tokens so far: `cpu.penalize`'s.

    logits: fp32, bf16 or fp16, columns contiguous. token_ids: int32 or int64 [B, L], prompt then output, ids
        in [0, V), columns contiguous; what lies past a row's end is not read. prompt_lens, lens: int [B],
        tokens of the prompt and of both.
    repetition, presence, frequency: fp32 [B]; 1, 0 and 0 change nothing.
    counts: int32 [at least B, V], all zero, and all zero again afterwards; it saves a GPU clearing one.
    Bitwise the same on both devices.
    """
    given = (logits, token_ids, prompt_lens, lens, repetition, presence, frequency, counts)
    _editing(logits).penalize_batch(*given)


def bias_batch(
    logits: torch.Tensor, bias_ids: torch.Tensor, biases: torch.Tensor, banned_ids: torch.Tensor
) -> None:
    """Add `biases` to the logits of `bias_ids`, then forbid `banned_ids`, in place.

    logits: fp32, bf16 or fp16 [B, V], columns contiguous. bias_ids: int64 [B, N], ids of a row distinct;
        biases: fp32 [B, N]; banned_ids: int64 [B, M]; all contiguous, N and M may be 0, ids outside [0, V)
        are padding. A forbidden logit becomes the lowest finite number, which no draw reaches and which keeps
        the row finite.
    """
    _editing(logits).bias_batch(logits, bias_ids, biases, banned_ids)


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
    return greedy(logits)[1] if logits.is_cuda else cpu.rows_finite(logits)


def _sampling(logits: torch.Tensor) -> ModuleType:
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_sample

        return triton_sample
    return cpu_batch


def _editing(logits: torch.Tensor) -> ModuleType:
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_penalties

        return triton_penalties
    return cpu_batch
