"""Runs a step's plan on one shard: copies, forward pass, logits, draws. Touches no queue."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hybridserve.kernels.sampler import keep_drawn
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.replicas.engine.plan import (
    SampleSpec,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from hybridserve.replicas.models.batch import LayerCache, StepBatch
from hybridserve.replicas.runner.batching import Batcher, StepArrays, build_batch
from hybridserve.replicas.runner.captured_graph import CapturedGraph
from hybridserve.replicas.runner.decode_graphs import DecodeGraphs
from hybridserve.replicas.runner.denormals import flushed_denormals
from hybridserve.replicas.runner.draws import Draws, FetchedDraws
from hybridserve.replicas.runner.piece_graphs import GraphMaker, PieceGraphs, PieceModel
from hybridserve.replicas.runner.sampling import Sampler
from hybridserve.replicas.runner.storage import ArenaStorage

PROMPT_LOGPROB_ROWS = 256
"""Rows of fp32 logits made at once for prompt logprobs: a whole chunk of a large vocabulary would not fit."""


class Model(Protocol):
    """What the runner needs of a model."""

    model: PieceModel

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm."""

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [R, the shard's ids] of hidden states [R, hidden], in `out` where it is given."""

    @property
    def vocabulary(self) -> VocabularyShard:
        """Which ids these are, and how the shards draw from them."""


@dataclass(frozen=True)
class GraphLimits:
    """What sizes the fixed memory of graphs."""

    max_model_len: int
    max_num_batched_tokens: int
    dtype: torch.dtype


class SubmittedStep:
    """A step whose kernels are queued; a GPU may still be at it."""

    def __init__(
        self,
        request_ids: Sequence[str],
        draws: FetchedDraws | None,
        prompt_logprobs: dict[str, tuple[tuple[int, TokenLogprobs], ...]],
    ) -> None:
        self._request_ids = request_ids
        self._draws = draws
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> StepResult:
        sampled = self._draws.sampled() if self._draws is not None else []
        return StepResult(dict(zip(self._request_ids, sampled, strict=True)), self._prompt_logprobs)


class ModelRunner:
    """An Executor in this process.

    On a GPU `submit` only queues work: what a step draws stays on the device for the next one (`drawn`), and
    the host reads it when it asks for the result.
    """

    def __init__(
        self,
        model: Model,
        storage: ArenaStorage,
        device: torch.device,
        *,
        max_num_seqs: int,
        overlaps: bool | None = None,
    ) -> None:
        """`overlaps`: None for what the device is good for."""
        self._model = model
        self._storage = storage
        self._device = device
        self._batcher = Batcher(storage.layout)
        self._sampler = Sampler(device, model.vocabulary)
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._drawn = torch.zeros(2, max_num_seqs, dtype=torch.int64, device=device)
        self._draw_rows: dict[str, int] = {}
        """Request id -> row of `_drawn`, of the last step that was submitted."""
        self.overlaps = device.type == "cuda" if overlaps is None else overlaps

    def make_graphs(
        self, limits: GraphLimits, graph: GraphMaker | None = None
    ) -> tuple[DecodeGraphs, PieceGraphs]:
        """Graphs of this runner's steps, not captured yet, with their fixed memory; CUDA's by default."""
        graph = graph or partial(CapturedGraph, group=self._model.vocabulary.group)
        caches = self._storage.caches
        decode = DecodeGraphs(
            lambda batch: self._model.forward(batch, caches),
            self._model.compute_logits,
            self._storage,
            self._drawn,
            vocabulary=self._model.vocabulary,
            max_model_len=limits.max_model_len,
            device=self._device,
        )
        pieces = PieceGraphs(
            self._model.model, limits.dtype, self._device, limits.max_num_batched_tokens, graph
        )
        return decode, pieces

    @torch.inference_mode()
    def capture_graphs(self, limits: GraphLimits) -> int:
        """From now on steps of decode rows and of few tokens replay graphs; returns how many there are."""
        decode, pieces = self.make_graphs(limits)
        decode.capture()
        pieces.capture()
        self._graphs, self._pieces = decode, pieces
        return decode.num_graphs + pieces.num_graphs

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        with flushed_denormals() if self._device.type == "cpu" else nullcontext():
            return self._run(plan)

    def check(self) -> None:
        """Nothing outside of this process could fail."""

    def shutdown(self) -> None:
        """End what runs, which other ranks take part in, and let go of the graphs: a group that was given up
        waits for their end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs = self._pieces = None

    def _run(self, plan: StepPlan) -> SubmittedStep:
        self._storage.copy(plan.copies)
        arrays = self._batcher.arrays(plan, self._draw_rows)
        samples = [(s.request_id, s.sample) for s in plan.sequences if s.sample is not None]
        specs = [spec for _, spec in samples]
        prompt_logprobs: dict[str, tuple[tuple[int, TokenLogprobs], ...]] = {}
        if self._graphs is not None and self._graphs.takes(plan):
            draws: Draws | None = self._graphs.run(arrays, specs, self._sampler)
        else:
            draws = self._run_eagerly(plan, arrays, specs, prompt_logprobs)
            if draws is not None:
                keep_drawn(draws.tokens, draws.finite, self._drawn)
        request_ids = [request_id for request_id, _ in samples]
        self._draw_rows = {request_id: row for row, request_id in enumerate(request_ids)}
        if draws is None:
            return SubmittedStep(request_ids, None, prompt_logprobs)
        return SubmittedStep(request_ids, FetchedDraws(draws, specs), prompt_logprobs)

    def _run_eagerly(
        self,
        plan: StepPlan,
        arrays: StepArrays,
        specs: Sequence[SampleSpec],
        prompt_logprobs: dict[str, tuple[tuple[int, TokenLogprobs], ...]],
    ) -> Draws | None:
        window = self._storage.layout.unit.replay_window
        batch = build_batch(arrays, self._drawn[0], window, self._device)
        few = self._pieces is not None and self._pieces.takes(batch.num_tokens)
        forward = self._pieces.forward if few else self._model.forward
        hidden = forward(batch, self._storage.caches)
        prompt_logprobs.update(self._prompt_logprobs(plan, hidden))
        if not specs:
            return None
        logits = self._model.compute_logits(hidden[batch.logits_indices])
        return self._sampler.draw(logits, specs)

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
            logprobs = self._sampler.logprobs_of(logits, block, sequence.prompt_logprobs)
            found += zip(block, logprobs, strict=True)
        return tuple(found)
