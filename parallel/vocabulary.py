"""Drawing tokens from logits whose columns are cut over the ranks of a group, without gathering them.

Owns which ids a rank holds, and what the ranks tell each other of their parts: a few numbers a row for greedy
and unfiltered rows, the likeliest ids for filtered ones. Every function returns the same on all ranks, and
the tokens that one rank would draw from whole rows. Knows nothing of requests.
"""

import torch
import torch.nn.functional as F

from hybridserve.kernels import sampler
from hybridserve.kernels.sampler import partial
from hybridserve.parallel.group import TensorParallelGroup

CANDIDATES = 1024
"""Likeliest ids that each rank tells of at most, for a filtered row."""


class VocabularyShard:
    """The ids [start, end) of one rank: equal parts, the last one shorter where they do not come out even.

    Logits are fp32 [R, end - start], ids and everything else of a row the model's own. With one rank the
    functions are `kernels.sampler`'s of the same names.
    """

    def __init__(self, vocab_size: int, group: TensorParallelGroup) -> None:
        """Raises ValueError if a rank would have no ids."""
        self.vocab_size, self.group = vocab_size, group
        self.width = -(-vocab_size // group.size)
        """Ids of every rank but the last."""
        if (group.size - 1) * self.width >= vocab_size:
            raise ValueError(
                f"tp_size {group.size} leaves a rank without tokens of vocab_size {vocab_size}: "
                f"{self.width} on each of the others are all"
            )
        self.start = group.rank * self.width
        self.end = min(self.start + self.width, vocab_size)
        self.num_gathered_rows = 0
        """Rows that the candidates did not settle, so that they were gathered whole; since the start."""

    @property
    def count(self) -> int:
        return self.end - self.start

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All ids' logits, [R, vocab_size]."""
        if self.group.size == 1:
            return logits
        # ranks gather equal widths; the padding lies past the vocabulary's end and is cut off
        padded = F.pad(logits, (0, self.width - self.count))
        return self.group.all_gather(padded, dim=1)[:, : self.vocab_size]

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest id of each row's largest logit, int64 [R], and whether the row is finite, bool [R].

        One gather of 12 bytes a row and rank, which a CUDA graph can hold.
        """
        if self.group.size == 1:
            return sampler.greedy(logits)
        tokens, finite, _ = self._largest(logits)
        return tokens, finite

    def sample_seeded(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row, int64 [R], and whether the row is finite: `kernels.sampler.sample_seeded`.

        With several ranks the host waits for parts of it, so a CUDA graph cannot hold it.
        """
        given = (temperature, top_k, top_p, min_p)
        if self.group.size == 1:
            return sampler.sample_seeded(logits, *given, seeds, positions)
        logits, tokens, finite, largest = self._without_broken(logits)
        keys = partial.draw_keys(seeds, positions)
        tokens = self._draw_unfiltered(logits, tokens, largest, temperature, keys)
        filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        rows = filtered.nonzero().squeeze(1)
        if rows.numel():
            options = (x.index_select(0, rows) for x in (largest, *given, keys))
            tokens[rows] = self._draw_filtered(logits.index_select(0, rows), *options)
        return tokens, finite

    def sample_unfiltered(
        self, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sample_seeded` of rows that have no filters.

        The host waits for nothing, so a CUDA graph can hold it. Two gathers: 12 and 8 bytes a row and rank.
        """
        logits, tokens, finite, largest = self._without_broken(logits)
        keys = partial.draw_keys(seeds, positions)
        return self._draw_unfiltered(logits, tokens, largest, temperature, keys), finite

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities of given and of the likeliest tokens: `kernels.sampler.token_logprobs`."""
        if self.group.size == 1:
            return sampler.token_logprobs(logits, token_ids, num_top)
        local = token_ids - self.start
        held = (local >= 0) & (local < self.count)
        chosen = logits.gather(1, local.clamp(0, self.count - 1).unsqueeze(1)).squeeze(1)
        chosen = torch.where(held, chosen, -torch.inf)
        values, ids = self._likeliest(logits, min(num_top, self.width))
        sums, chosen, values, ids = self._exchange(
            logits.logsumexp(-1, keepdim=True), chosen.unsqueeze(1), values, ids
        )
        normalizer = sums.logsumexp(-1, keepdim=True)
        chosen = chosen.amax(-1, keepdim=True)
        rank = 1 + self.group.all_reduce((logits > chosen).sum(-1))
        values, ids = partial.merged(values, ids, num_top)
        return (chosen - normalizer).squeeze(1), rank, ids, values - normalizer

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`greedy`, and each row's largest logit, fp32 [R]."""
        tokens, finite = sampler.greedy(logits)
        # where launches are only recorded, what they would have written is no id
        own = tokens.clamp(0, self.count - 1).unsqueeze(1)
        values, ids, finite = self._exchange(logits.gather(1, own), own + self.start, finite.unsqueeze(1))
        return _first_best(values, ids), finite.bool().all(-1), values.amax(-1)

    def _without_broken(
        self, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The logits with zeros in rows that are not finite; then `_largest`'s, of these."""
        tokens, finite, largest = self._largest(logits)
        # what is drawn from a broken row is thrown away, but it must not break the others
        logits = torch.where(finite.unsqueeze(1), logits, 0.0)
        return logits, tokens, finite, torch.where(finite, largest, 0.0)

    def _draw_unfiltered(
        self,
        logits: torch.Tensor,
        greedy: torch.Tensor,
        largest: torch.Tensor,
        temperature: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """The id of the best score of all ranks, or `greedy` for rows of temperature 0."""
        random = temperature > 0
        divisor = torch.where(random, temperature, 1.0)
        scores, local = partial.best_score(logits, largest, divisor, keys, self.start)
        drawn = _first_best(*self._exchange(scores.unsqueeze(1), local.unsqueeze(1) + self.start))
        return torch.where(random, drawn, greedy)

    def _draw_filtered(
        self,
        logits: torch.Tensor,
        largest: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """From the likeliest ids of all ranks and the weight of all ids; rows that these do not settle are
        gathered and drawn whole."""
        limits = torch.where(top_k > 0, top_k, self.vocab_size)
        count = min(CANDIDATES, self.width, int(limits.max()))
        weight = partial.total_weight(logits, largest, temperature)
        values, ids, weight = self._exchange(*self._likeliest(logits, count), weight.unsqueeze(1))
        # the best `count` of all ranks are among the best `count` of each
        values, ids = partial.merged(values, ids, self.vocab_size if count == self.width else count)
        options = (temperature, top_k, top_p, min_p, keys)
        tokens, settled = partial.draw_ranked(values, ids, self.vocab_size, *options, weight.sum(-1))
        rest = (~settled).nonzero().squeeze(1)
        if rest.numel():
            self.num_gathered_rows += rest.numel()
            whole = self.gather(logits.index_select(0, rest))
            tokens[rest] = sampler.sample(whole, *(x.index_select(0, rest) for x in options))[0]
        return tokens

    def _likeliest(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's `count` best logits and their ids, [R, count], filled up with -inf."""
        values, ids = partial.ranked(logits, min(count, self.count))
        missing = (0, count - values.shape[1])
        return F.pad(values, missing, value=-torch.inf), F.pad(ids + self.start, missing)

    def _exchange(self, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each of `columns`, [R, n] of any dtype, of all ranks side by side, [R, size * n]: one gather.

        Integers, which are ids or flags, come back as int64.
        """
        words = [
            x.contiguous().view(torch.int32) if x.is_floating_point() else x.to(torch.int32) for x in columns
        ]
        sizes = [x.shape[1] for x in words]
        gathered = self.group.all_gather(torch.cat(words, 1).unsqueeze(0), dim=0)
        parts = gathered.transpose(0, 1).split(sizes, dim=2)
        return tuple(
            part.flatten(1).view(x.dtype) if x.is_floating_point() else part.flatten(1).long()
            for part, x in zip(parts, columns, strict=True)
        )


def _first_best(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest value, [R, size]; of equal ones that of the lowest rank, the lowest."""
    return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)
