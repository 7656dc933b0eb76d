"""Sampling one row by a full sort, in Python floats: the truth the fast path is tested against."""

import math

from hybridserve.kernels.sampler.random import gumbel_noise


def kept_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The tokens that the filters leave, likeliest first, equal ones by rising id; each keeps a prefix."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((x - logits[ranked[0]]) / temperature) for x in logits]
    kept = ranked[:top_k] if top_k > 0 else ranked
    total, before = math.fsum(weight[i] for i in kept), 0.0
    nucleus = []
    for i in kept:
        if top_p < 1 and before >= top_p * total:
            break
        nucleus.append(i)
        before += weight[i]
    return [i for i in nucleus if weight[i] >= min_p]


def scores_reference(logits: list[float], temperature: float, key: int) -> list[float]:
    """What the draw compares: (logit - largest) / temperature + the token's Gumbel noise."""
    top = max(logits)
    return [(x - top) / temperature + gumbel_noise(key, i) for i, x in enumerate(logits)]


def sample_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, key: int
) -> int:
    """One token of one row: temperature, top_k, top_p, min_p, then the largest score of what is kept.

    The largest of logits with independent Gumbel noise is a draw from their softmax (Gumbel 1954).
    """
    if temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    scores = scores_reference(logits, temperature, key)
    return max(kept_reference(logits, temperature, top_k, top_p, min_p), key=lambda i: (scores[i], -i))
