"""From logits and each row's SampleSpec to draws: which rows need what, batched over the operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridserve.kernels.sampler import bias_batch, greedy, penalize_batch, sample_seeded, token_logprobs
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
    """Draws one token a row. A row's result depends on its own logits and spec alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draw(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> Draws:
        """Draw from fp32 `logits` [R, vocab], one spec a row; the logits are changed in place."""
        wants_logprobs = any(s.params.logprobs is not None for s in specs)
        raw = logits.clone() if wants_logprobs and any(map(edits_logits, specs)) else logits
        self._edit(logits, specs)
        if all(s.params.greedy for s in specs):
            tokens, finite = greedy(logits)
        else:
            a = SampleArrays.of(specs, logits.shape[1])
            order = (a.temperature, a.top_k, a.top_p, a.min_p, a.seeds, a.positions)
            tokens, finite = sample_seeded(logits, *upload(order, self._device))
        return Draws(tokens, finite, self._logprobs(raw, tokens, specs) if wants_logprobs else None)

    def _edit(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """Penalties, then biases and bans, in place."""
        if any(s.params.has_penalty for s in specs):
            params = [s.params for s in specs]
            ids = _padded([s.token_ids if s.params.has_penalty else () for s in specs], 0)
            lens = np.asarray([len(s.token_ids) for s in specs], dtype=np.int64)
            penalties = (
                np.asarray([getattr(p, name) for p in params], dtype=np.float32)
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            )
            prompt_lens = np.asarray([s.prompt_len for s in specs], dtype=np.int64)
            penalize_batch(logits, *upload([ids, prompt_lens, lens, *penalties], self._device))
        if any(s.params.logit_bias or s.banned_token_ids for s in specs):
            biases = [s.params.logit_bias or {} for s in specs]
            arrays = [
                _padded(biases, NO_TOKEN),
                _padded([list(b.values()) for b in biases], 0.0, np.float32),
                _padded([s.banned_token_ids for s in specs], NO_TOKEN),
            ]
            bias_batch(logits, *upload(arrays, self._device))

    def _logprobs(
        self, raw: torch.Tensor, tokens: torch.Tensor, specs: Sequence[SampleSpec]
    ) -> DrawnLogprobs:
        rows = tuple(i for i, s in enumerate(specs) if s.params.logprobs is not None)
        (index,) = upload([np.asarray(rows, dtype=np.int64)], self._device)
        num_top = max(specs[i].params.logprobs or 0 for i in rows)
        found = token_logprobs(raw.index_select(0, index), tokens.index_select(0, index), num_top)
        return DrawnLogprobs(rows, *found)


def token_logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token a row of fp32 `logits` [R, vocab], with the `num_top` likeliest."""
    ids = torch.tensor(token_ids, device=logits.device)
    logprob, rank, top_ids, top_logprobs = (t.tolist() for t in token_logprobs(logits, ids, num_top))
    return [
        TokenLogprobs(lp, r, tuple(t), tuple(tl))
        for lp, r, t, tl in zip(logprob, rank, top_ids, top_logprobs, strict=True)
    ]


def edits_logits(spec: SampleSpec) -> bool:
    """Whether a row's logits are changed before it is drawn."""
    return bool(spec.params.has_penalty or spec.params.logit_bias or spec.banned_token_ids)


def _padded(rows: Sequence[Sequence], fill: float, dtype: Callable = np.int64) -> np.ndarray:
    """The rows side by side in one array, filled up to the longest."""
    table = np.full((len(rows), max(map(len, rows))), fill, dtype=dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = list(values)
    return table
