"""From logits to tokens: penalties, filters, the draw, logprobs, and the random numbers."""

from hybridserve.kernels.sampler.cpu import penalize, rows_finite, sample, token_logprobs
from hybridserve.kernels.sampler.random import uniform_from_seed

__all__ = ["penalize", "rows_finite", "sample", "token_logprobs", "uniform_from_seed"]
