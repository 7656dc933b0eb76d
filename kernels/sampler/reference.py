"""Sampling one row by a full sort, in Python floats: the truth the fast path is tested against."""

import math


def sample_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One token of one row: temperature, top_k, top_p, min_p, then the inverse of the cumulative sum.

    Tokens are ranked by falling logit, equal ones by rising id; each filter keeps a prefix of that ranking.
    The draw walks the ranking, or the ids in rising order where no filter is on.
    """
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return ranked[0]
    top = logits[ranked[0]]
    weight = [math.exp((x - top) / temperature) for x in logits]
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        kept = list(range(len(logits)))
    else:
        kept = ranked[:top_k] if top_k > 0 else ranked
        total, below = math.fsum(weight[i] for i in kept), 0.0
        nucleus = []
        for i in kept:
            if top_p < 1 and below >= top_p * total:
                break
            nucleus.append(i)
            below += weight[i]
        kept = [i for i in nucleus if weight[i] >= min_p]
    target, walked = uniform * math.fsum(weight[i] for i in kept), 0.0
    for i in kept:
        walked += weight[i]
        if walked > target:
            return i
    return max(i for i in kept if weight[i] > 0)
