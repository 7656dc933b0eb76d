"""Runs a step's plan on one shard: copies, forward pass, logits, draws. Touches no queue."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from hybridserve.replicas.engine.plan import ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from hybridserve.replicas.models.batch import LayerCache, StepBatch
from hybridserve.replicas.runner.batching import build_batch
from hybridserve.replicas.runner.denormals import flushed_denormals
from hybridserve.replicas.runner.sampling import Sampler, token_logprobs_of
from hybridserve.replicas.runner.storage import ArenaStorage

PROMPT_LOGPROB_ROWS = 256
"""Rows of fp32 logits made at once for prompt logprobs: a whole chunk of a large vocabulary would not fit."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [R, vocab] of hidden states [R, hidden]."""


class ModelRunner:
    """An Executor in this process."""

    def __init__(self, model: Model, storage: ArenaStorage, device: torch.device) -> None:
        self._model = model
        self._storage = storage
        self._device = device
        self._sampler = Sampler(device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        with flushed_denormals() if self._device.type == "cpu" else nullcontext():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        self._storage.copy(plan.copies)
        batch = build_batch(plan, self._storage.layout, self._device)
        hidden = self._model.forward(batch, self._storage.caches)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        samples = [(s.request_id, s.sample) for s in plan.sequences if s.sample is not None]
        if not samples:
            return StepResult(prompt_logprobs=prompt_logprobs)
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        drawn = self._sampler.sample(logits, [spec for _, spec in samples])
        ids = (request_id for request_id, _ in samples)
        return StepResult(dict(zip(ids, drawn, strict=True)), prompt_logprobs)

    def _prompt_logprobs(
        self, plan: StepPlan, hidden: torch.Tensor
    ) -> dict[str, tuple[tuple[int, TokenLogprobs], ...]]:
        found = {}
        start = 0
        for sequence in plan.sequences:
            if sequence.prompt_logprobs is not None and sequence.next_token_ids:
                found[sequence.request_id] = self._chunk_logprobs(sequence, hidden[start:])
            start += len(sequence.token_ids)
        return found

    def _chunk_logprobs(
        self, sequence: ScheduledSequence, hidden: torch.Tensor
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        """Log-probabilities of the prompt tokens that follow the chunk whose states `hidden` begins with."""
        assert sequence.prompt_logprobs is not None
        targets = list(sequence.next_token_ids)
        found: list[tuple[int, TokenLogprobs]] = []
        for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            block = targets[at : at + PROMPT_LOGPROB_ROWS]
            logits = self._model.compute_logits(hidden[at : at + len(block)])
            found += zip(block, token_logprobs_of(logits, block, sequence.prompt_logprobs), strict=True)
        return tuple(found)
