"""The steps of a draw one by one, for ranks that hold some columns of every row and meet in between.

Plain PyTorch of `cpu`, on either device; what a rank computes of its columns is to the bit what `cpu`
computes of them in a whole row, sums aside. Knows nothing of how ranks meet.
"""

import torch

from hybridserve.kernels.sampler import cpu
from hybridserve.kernels.sampler.cpu import draw_keys

__all__ = ["best_score", "draw_keys", "draw_ranked", "merged", "ranked", "total_weight"]


def ranked(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row of logits [R, n], by falling value and rising column; with columns."""
    return cpu.ranked(logits, count)


def merged(values: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` of parts ranked one by one, side by side [R, m], lower ids in earlier parts."""
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def total_weight(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp64 [R], the sum of exp((logit - largest) / temperature) over logits [R, n]; the others [R]."""
    return cpu.total_weight(logits, largest.unsqueeze(1), temperature)


def best_score(
    logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an unfiltered draw compares: the best score of logits [R, n], fp32 [R], and its column, int64 [R].

    Columns are the ids from `first_id` on. largest: fp32 [R], of the whole rows; keys: int64 [R].
    """
    return cpu.best_score(logits, largest.unsqueeze(1), temperature, keys, first_id)


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
    """The token drawn among the n likeliest of each row, int64 [R], and whether these settle it, bool [R].

    values, ids: [R, n], ranked. total: fp64 [R], `total_weight` of whole rows.
    """
    options = (temperature, top_k, top_p.double(), min_p.double(), keys, total)
    position, settled = cpu.draw_ranked(values, ids, vocab, *options)
    return ids.gather(1, position.unsqueeze(1)).squeeze(1), settled
