"""From logits and each row's SampleSpec to tokens: which rows need what, batched over the operators."""

from collections.abc import Sequence

import torch

from hybridserve.kernels.sampler import draw_key, penalize, rows_finite, sample, token_logprobs
from hybridserve.replicas.engine.plan import Sampled, SampleSpec, TokenLogprobs
from hybridserve.replicas.sampling_params import SamplingParams


class Sampler:
    """Draws one token a row. A row's result depends on its own logits and spec alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Draw from fp32 `logits` [R, vocab], one spec a row; the logits are changed in place."""
        finite = rows_finite(logits).tolist()
        if not all(finite):
            # whatever is drawn from such a row is thrown away, but it must not break the step of the others
            logits[torch.tensor(finite, device=self._device).logical_not()] = 0.0
        wants_logprobs = any(s.params.logprobs is not None for s in specs)
        raw = logits.clone() if wants_logprobs and any(map(_edits_logits, specs)) else logits
        for row, spec in zip(logits, specs, strict=True):
            self._edit(row, spec)
        if all(s.params.greedy for s in specs):
            tokens = logits.argmax(-1)
        else:
            tokens = sample(
                logits, *self._filters([s.params for s in specs], logits.shape[1]), self._keys(specs)
            )
        ids = tokens.tolist()
        logprobs = self._logprobs(raw, ids, specs) if wants_logprobs else [None] * len(specs)
        return [Sampled(*row) for row in zip(ids, finite, logprobs, strict=True)]

    def _edit(self, row: torch.Tensor, spec: SampleSpec) -> None:
        """Penalties, biases and bans of one row [vocab], in place."""
        params = spec.params
        if _has_penalty(params):
            penalize(
                row,
                torch.tensor(spec.token_ids[: spec.prompt_len], device=self._device),
                torch.tensor(spec.token_ids[spec.prompt_len :], device=self._device, dtype=torch.int64),
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self._device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=self._device)
        if spec.banned_token_ids:
            row[torch.tensor(spec.banned_token_ids, device=self._device)] = float("-inf")

    def _filters(self, params: Sequence[SamplingParams], vocab: int) -> tuple[torch.Tensor, ...]:
        """temperature, top_k, top_p, min_p, each [R]."""
        # a top_k may be beyond what a tensor's integers hold
        top_k = [min(p.top_k, vocab) for p in params]
        return (
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=self._device),
            torch.tensor(top_k, dtype=torch.int64, device=self._device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=self._device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=self._device),
        )

    def _keys(self, specs: Sequence[SampleSpec]) -> torch.Tensor:
        return torch.tensor([draw_key(s.seed, s.position) for s in specs], device=self._device)

    def _logprobs(
        self, raw: torch.Tensor, ids: Sequence[int], specs: Sequence[SampleSpec]
    ) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(specs)
        rows = [i for i, s in enumerate(specs) if s.params.logprobs is not None]
        num_top = max(specs[i].params.logprobs or 0 for i in rows)
        entries = token_logprobs_of(raw[rows], [ids[i] for i in rows], num_top)
        for i, entry in zip(rows, entries, strict=True):
            keep = specs[i].params.logprobs
            found[i] = TokenLogprobs(
                entry.logprob, entry.rank, entry.top_token_ids[:keep], entry.top_logprobs[:keep]
            )
        return found


def token_logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token a row of fp32 `logits` [R, vocab], with the `num_top` likeliest."""
    ids = torch.tensor(token_ids, device=logits.device)
    logprob, rank, top_ids, top_logprobs = (t.tolist() for t in token_logprobs(logits, ids, num_top))
    return [
        TokenLogprobs(lp, r, tuple(t), tuple(tl))
        for lp, r, t, tl in zip(logprob, rank, top_ids, top_logprobs, strict=True)
    ]


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _edits_logits(spec: SampleSpec) -> bool:
    return bool(_has_penalty(spec.params) or spec.params.logit_bias or spec.banned_token_ids)
