"""The sampler on the CPU: penalties, temperature, top-k, top-p, min-p, the draw, and logprobs.

A row's result is a function of that row alone. Knows nothing of requests; keys of the noise are handed in.
"""

from collections.abc import Sequence

import torch

from hybridserve.kernels.sampler.random import FIRST, GOLDEN, LARGEST, SECOND

# likeliest tokens looked at before a row's whole vocabulary is sorted
CANDIDATES = 256
# columns summed together: a row's sum then has one order whatever the number of rows or threads
BLOCK = 512
# scores of whole rows made at once: bounds the memory that a large vocabulary takes
SCORES_AT_ONCE = 1 << 22


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """One token a row.

    logits: fp32 [B, V]. temperature, top_p, min_p: floating [B]; top_k: integer [B]. Temperature 0 is greedy
        (the lowest id of the largest logit); top_k <= 0, top_p >= 1 and min_p <= 0 are off.
    keys: int64 [B], of `draw_key`.
    Returns int64 [B]. Filters apply in the order temperature, top_k, top_p, min_p; equal logits rank by
    rising id. Drawn is the largest of logit / temperature plus the token's own Gumbel noise: unlike a walk
    along a cumulative sum, the noise of rounding in a logit then moves no token but that one.
    """
    tokens = logits.argmax(-1)
    random = temperature > 0
    if not bool(random.any()):
        return tokens
    filtered = random & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    for rows, draw in ((random & ~filtered, _draw_unfiltered), (filtered, _draw_filtered)):
        index = rows.nonzero().squeeze(1)
        if index.numel():
            options = (x.index_select(0, index) for x in (temperature, top_k, top_p, min_p, keys))
            tokens[index] = draw(logits.index_select(0, index), *options)
    return tokens


def penalize(
    logits: torch.Tensor,
    prompt_ids: torch.Tensor | Sequence[torch.Tensor],
    output_ids: torch.Tensor | Sequence[torch.Tensor],
    repetition: float | Sequence[float],
    presence: float | Sequence[float],
    frequency: float | Sequence[float],
) -> None:
    """Apply penalties to logits [V], or [B, V] with one entry a row in every other argument, in place.

    prompt_ids, output_ids: int64 [n], any n. A token of prompt or output has its logit divided by
    `repetition` where positive, else multiplied by it (Keskar et al. 2019); then a token of the output loses
    `presence` once and `frequency` for each time it occurs (OpenAI's definition). 1, 0 and 0 change nothing.
    """
    if logits.ndim == 2:
        for row in zip(logits, prompt_ids, output_ids, repetition, presence, frequency, strict=True):
            penalize(*row)
        return
    if repetition != 1.0:
        seen = torch.cat((prompt_ids, output_ids)).unique()
        values = logits[seen]
        # a GPU divides by a number by multiplying with its reciprocal, which rounds differently
        divisor = torch.full_like(values, repetition)
        logits[seen] = torch.where(values > 0, values / divisor, values * repetition)
    if presence or frequency:
        ids, counts = output_ids.unique(return_counts=True)
        logits[ids] -= presence + frequency * counts.to(logits.dtype)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of given tokens and of the likeliest ones.

    logits: fp32 [R, V]. token_ids: int64 [R]. num_top: how many of the likeliest to return, at most V.
    Returns logprob fp32 [R]; rank int64 [R] (1: no token is likelier); top_ids int64 [R, num_top] and their
    top_logprobs fp32, likeliest first, equal ones by rising id.
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    rank = 1 + (logits > chosen).sum(-1)
    values, ids = ranked(logits, num_top)
    return (chosen - normalizer).squeeze(1), rank, ids, values - normalizer


def draw_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [B], `draw_key` of int64 seeds (modulo 2 ** 64, as two's complement) and positions [B]."""
    golden = _signed(GOLDEN)
    return _mix(_mix(seeds + golden) + (positions + 1) * golden)


def rows_finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [R]: whether a row of logits [R, V] is free of NaN and infinities."""
    # a finite sum of products with zero: 0 * NaN and 0 * inf are NaN
    return (logits * 0).sum(-1) == 0


def ranked(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, by falling value and rising id."""
    if 2 * count >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    # one more than asked for tells whether equal values were cut apart
    values, ids = logits.topk(count + 1, -1)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    values, ids, beyond = values[:, :count], ids[:, :count], values[:, count]
    if count:
        cut = (values[:, -1] == beyond).nonzero().squeeze(1)
        if cut.numel():
            full_values, full_ids = logits[cut].sort(dim=-1, descending=True, stable=True)
            values[cut], ids[cut] = full_values[:, :count], full_ids[:, :count]
    return values, ids


def total_weight(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp64 [R], the sum of exp((logit - peak) / temperature) over each row of logits [R, V]; peak [R, 1]."""
    num_rows, vocab = logits.shape
    weights = torch.zeros(num_rows, -(-vocab // BLOCK) * BLOCK, device=logits.device)
    torch.sub(logits, peak, out=weights[:, :vocab])
    weights[:, :vocab].div_(temperature.float().unsqueeze(1)).exp_()
    return weights.view(num_rows, -1, BLOCK).sum(-1, dtype=torch.float64).sum(-1)


def _scores(
    logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """(logit - top) / temperature + Gumbel noise, fp32 [R, n].

    logits: fp32 [R, n], of the tokens `ids`, [n] or [R, n]. top: [R, 1], the rows' largest logits. The noise
    is `gumbel_noise`'s.
    """
    bits = _mix(keys.unsqueeze(1) + (ids + 1) * _signed(GOLDEN))
    uniform = _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53).float().clamp_(max=LARGEST)
    noise = torch.log1p(uniform.neg_()).neg_().log_()
    return (logits - top).div_(temperature.float().unsqueeze(1)).sub_(noise)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64, whose products wrap."""
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """z >> count of int64 taken as unsigned."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _draw_unfiltered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draw from whole rows; the filters are known to be off."""
    return best_score(logits, logits.amax(-1, keepdim=True), temperature, keys, 0)[1]


def best_score(
    logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row, fp32 [R], and its column, int64 [R]; columns are ids from `first_id` on."""
    num_rows, vocab = logits.shape
    ids = torch.arange(first_id, first_id + vocab, device=logits.device)
    step = max(1, SCORES_AT_ONCE // vocab)
    best, columns = [], []
    for i in range(0, num_rows, step):
        rows = slice(i, i + step)
        scores = _scores(logits[rows], top[rows], temperature[rows], keys[rows], ids)
        columns.append(scores.argmax(-1, keepdim=True))
        best.append(scores.gather(1, columns[-1]))
    return torch.cat(best).squeeze(1), torch.cat(columns).squeeze(1)


def _draw_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draw from the candidates of each row; rows they do not settle are sorted whole."""
    vocab = logits.shape[1]
    # fewer candidates give the same ranking; a small top_k in every row needs no more than that
    bounded = top_k > 0
    count = min(CANDIDATES, vocab, int(torch.where(bounded, top_k, vocab).max()))
    total = torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)
    if bool(((~bounded | (top_k > count)) & (top_p < 1)).any()):
        total = total_weight(logits, logits.amax(-1, keepdim=True), temperature)
    options = (temperature, top_k, top_p.double(), min_p.double(), keys, total)
    values, ids = ranked(logits, count)
    position, settled = draw_ranked(values, ids, vocab, *options)
    tokens = ids.gather(1, position.unsqueeze(1)).squeeze(1)
    rest = (~settled).nonzero().squeeze(1)
    if rest.numel():
        values, ids = logits.index_select(0, rest).sort(dim=-1, descending=True, stable=True)
        position, _ = draw_ranked(values, ids, vocab, *(x.index_select(0, rest) for x in options))
        tokens[rest] = ids.gather(1, position.unsqueeze(1)).squeeze(1)
    return tokens


def draw_ranked(
    values: torch.Tensor,
    ids: torch.Tensor,
    vocab: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank drawn among the n largest logits of a row, values fp32 and ids [R, n], and whether n settle it.

    Every filter keeps a prefix of the ranking, so that the shortest prefix decides. total: fp64 [R], the sum
    of exp((logit - max) / temperature) over the whole row.
    """
    count = values.shape[1]
    weights = ((values - values[:, :1]).double() / temperature.double().unsqueeze(1)).exp_()
    cumulative = weights.cumsum(-1)
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    within = limit.clamp(max=count)
    total = torch.where(limit <= count, cumulative.gather(1, (within - 1).unsqueeze(1)).squeeze(1), total)
    keep = (cumulative - weights) < (top_p * total).unsqueeze(1)
    keep |= (top_p >= 1).unsqueeze(1)
    keep &= weights >= min_p.unsqueeze(1)
    kept = torch.minimum(keep.sum(-1), within).clamp_(min=1)
    # a top_k beyond the n largest leaves even the sum that top_p refers to unknown
    settled = (limit <= count) | ((limit == vocab) & (kept < count))
    scores = _scores(values, values[:, :1], temperature, keys, ids)
    beyond = torch.arange(count, device=values.device) >= kept.unsqueeze(1)
    return scores.masked_fill_(beyond, -torch.inf).argmax(-1), settled
