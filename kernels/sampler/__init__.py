"""TEMPORARY until k_sampler lands."""

import torch

from hybridserve.kernels.sampler import cpu
from hybridserve.kernels.sampler.cpu import penalize, sample
from hybridserve.kernels.sampler.drawn import keep_drawn, take_drawn
from hybridserve.kernels.sampler.random import draw_key


def token_logprobs(logits, token_ids, num_top):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_logprobs

        return triton_logprobs.token_logprobs(logits, token_ids, num_top)
    return cpu.token_logprobs(logits, token_ids, num_top)


def rows_finite(logits):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_greedy

        return triton_greedy.greedy(logits)[1]
    return cpu.rows_finite(logits)


def greedy(logits):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_greedy

        return triton_greedy.greedy(logits)
    finite = cpu.rows_finite(logits)
    return logits.argmax(-1), finite


def sample_seeded(logits, temperature, top_k, top_p, min_p, seeds, positions):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_sample

        return triton_sample.sample_seeded(logits, temperature, top_k, top_p, min_p, seeds, positions)
    finite = cpu.rows_finite(logits)
    logits = torch.where(finite[:, None], logits, 0.0)
    keys = torch.tensor([draw_key(s, p) for s, p in zip(seeds.tolist(), positions.tolist())])
    return sample(logits, temperature, top_k, top_p, min_p, keys), finite


def penalize_batch(logits, token_ids, prompt_lens, lens, repetition, presence, frequency, counts=None):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_penalties

        return triton_penalties.penalize_batch(
            logits, token_ids, prompt_lens, lens, repetition, presence, frequency, counts
        )
    for i in range(logits.shape[0]):
        penalize(
            logits[i],
            token_ids[i, : prompt_lens[i]],
            token_ids[i, prompt_lens[i] : lens[i]],
            repetition[i].item(),
            presence[i].item(),
            frequency[i].item(),
        )


def bias_batch(logits, bias_ids, biases, banned_ids):
    if logits.is_cuda:
        from hybridserve.kernels.sampler import triton_penalties

        return triton_penalties.bias_batch(logits, bias_ids, biases, banned_ids)
    for i in range(logits.shape[0]):
        k = bias_ids[i] >= 0
        logits[i][bias_ids[i][k]] += biases[i][k]
        b = banned_ids[i][banned_ids[i] >= 0]
        logits[i][b] = torch.finfo(torch.float32).min
