"""From logits and each row's SampleSpec to draws: which rows need what, batched over the operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridserve.kernels import sampler
from hybridserve.kernels.sampler import bias_batch, penalize_batch
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.replicas.engine.plan import SampleSpec, TokenLogprobs
from hybridserve.replicas.runner.draws import DrawnLogprobs, Draws
from hybridserve.replicas.runner.upload import upload

NO_TOKEN = -1
"""Fills up rows of token ids."""


@dataclass(frozen=True)
class SampleArrays:
    """How R rows are drawn, as the host's arrays."""

    temperature: np.ndarray
    """fp32 [R], as are top_p and min_p."""
    top_p: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    """int64 [R], as are seeds and positions."""
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab_size: int) -> "SampleArrays":
        params = [s.params for s in specs]
        seeds = np.asarray([s.seed % 2**64 for s in specs], dtype=np.uint64)
        return cls(
            np.asarray([p.temperature for p in params], dtype=np.float32),
            np.asarray([p.top_p for p in params], dtype=np.float32),
            np.asarray([p.min_p for p in params], dtype=np.float32),
            # a top_k may be beyond what an array's integers hold
            np.asarray([min(p.top_k, vocab_size) for p in params], dtype=np.int64),
            seeds.view(np.int64),
            np.asarray([s.position for s in specs], dtype=np.int64),
        )


class Sampler:
    """Draws one token a row. A row's result depends on its own logits and spec alone.

    With a `vocabulary` of several ranks the logits are its ids' of every row; all ranks draw the same.
    """

    def __init__(self, device: torch.device, vocabulary: VocabularyShard | None = None) -> None:
        """`vocabulary`: None for logits of all ids."""
        self._device = device
        self._shard = vocabulary if vocabulary is not None and vocabulary.group.size > 1 else None
        self._draws = self._shard or sampler
        self._first_id = self._shard.start if self._shard else 0

    def draw(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> Draws:
        """Draw from fp32 `logits` [R, ids], one spec a row; the logits are changed in place."""
        wants_logprobs = any(s.params.logprobs is not None for s in specs)
        raw = logits.clone() if wants_logprobs and any(map(edits_logits, specs)) else logits
        self._edit(logits, specs)
        if all(s.params.greedy for s in specs):
            tokens, finite = self._draws.greedy(logits)
        else:
            a = SampleArrays.of(specs, self._shard.vocab_size if self._shard else logits.shape[1])
            if self._shard is not None and not any(map(has_filters, specs)):
                order = (a.temperature, a.seeds, a.positions)
                tokens, finite = self._shard.sample_unfiltered(logits, *upload(order, self._device))
            else:
                order = (a.temperature, a.top_k, a.top_p, a.min_p, a.seeds, a.positions)
                tokens, finite = self._draws.sample_seeded(logits, *upload(order, self._device))
        return Draws(tokens, finite, self._logprobs(raw, tokens, specs) if wants_logprobs else None)

    def _edit(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """Penalties, then biases and bans, in place."""
        if any(s.params.has_penalty for s in specs):
            params = [s.params for s in specs]
            rows, prompt_lens = zip(*(self._held_ids(s, logits.shape[1]) for s in specs), strict=True)
            lens = np.asarray([len(row) for row in rows], dtype=np.int64)
            penalties = (
                np.asarray([getattr(p, name) for p in params], dtype=np.float32)
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            )
            arrays = [_padded(rows, 0), np.asarray(prompt_lens, dtype=np.int64), lens, *penalties]
            penalize_batch(logits, *upload(arrays, self._device))
        if any(s.params.logit_bias or s.banned_token_ids for s in specs):
            biases = [s.params.logit_bias or {} for s in specs]
            # other ranks' ids come out as those that fill up: outside of the rank's columns
            arrays = [
                _padded(biases, NO_TOKEN) - self._first_id,
                _padded([list(b.values()) for b in biases], 0.0, np.float32),
                _padded([s.banned_token_ids for s in specs], NO_TOKEN) - self._first_id,
            ]
            bias_batch(logits, *upload(arrays, self._device))

    def _held_ids(self, spec: SampleSpec, num_columns: int) -> tuple[Sequence[int] | np.ndarray, int]:
        """The columns of a row's tokens so far, and how many are the prompt's; none without penalty."""
        if not spec.params.has_penalty:
            return (), 0
        if self._shard is None:
            return spec.token_ids, spec.prompt_len
        columns = np.asarray(spec.token_ids, dtype=np.int64) - self._first_id
        held = (columns >= 0) & (columns < num_columns)
        return columns[held], int(held[: spec.prompt_len].sum())

    def _logprobs(
        self, raw: torch.Tensor, tokens: torch.Tensor, specs: Sequence[SampleSpec]
    ) -> DrawnLogprobs:
        rows = tuple(i for i, s in enumerate(specs) if s.params.logprobs is not None)
        (index,) = upload([np.asarray(rows, dtype=np.int64)], self._device)
        num_top = max(specs[i].params.logprobs or 0 for i in rows)
        found = self._draws.token_logprobs(raw.index_select(0, index), tokens.index_select(0, index), num_top)
        return DrawnLogprobs(rows, *found)

    def logprobs_of(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of one token a row of fp32 `logits` [R, ids], with the `num_top` likeliest."""
        ids = torch.tensor(token_ids, device=logits.device)
        found = self._draws.token_logprobs(logits, ids, num_top)
        logprob, rank, top_ids, top_logprobs = (t.tolist() for t in found)
        return [
            TokenLogprobs(lp, r, tuple(t), tuple(tl))
            for lp, r, t, tl in zip(logprob, rank, top_ids, top_logprobs, strict=True)
        ]


def edits_logits(spec: SampleSpec) -> bool:
    """Whether a row's logits are changed before it is drawn."""
    return bool(spec.params.has_penalty or spec.params.logit_bias or spec.banned_token_ids)


def has_filters(spec: SampleSpec) -> bool:
    """Whether a row is drawn from some of its tokens only; a greedy row has none."""
    params = spec.params
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _padded(rows: Sequence[Sequence], fill: float, dtype: Callable = np.int64) -> np.ndarray:
    """The rows side by side in one array, filled up to the longest."""
    table = np.full((len(rows), max(map(len, rows))), fill, dtype=dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = list(values)
    return table
