"""Decode-only steps as CUDA graphs, one a batch bucket: forward pass, draw, and its feedback.

A step of n rows runs in the smallest bucket that holds it; the rows behind are padding, which reads and
writes no state and no page. The host's part of a step is one transfer into fixed memory and two launches of
graphs: model, then draw. Rows whose logits are edited, or that want logprobs, are drawn outside of a graph;
with several shards also those with filters, which may have to ask the other shards for whole rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hybridserve.kernels.sampler import keep_drawn, take_drawn
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.replicas.engine.plan import SampleSpec, StepPlan
from hybridserve.replicas.models.batch import ReplayRows, StepBatch
from hybridserve.replicas.runner.batching import KNOWN, StepArrays
from hybridserve.replicas.runner.captured_graph import CapturedGraph
from hybridserve.replicas.runner.draws import Draws
from hybridserve.replicas.runner.sampling import SampleArrays, Sampler, edits_logits, has_filters
from hybridserve.replicas.runner.storage import ArenaStorage

ROW_ALIGN = 32
"""Rows of the fixed memory are a multiple, so that every field starts on an aligned address."""

INTS = (
    "token_ids",
    "sources",
    "positions",
    "state_indices",
    "slot_mapping",
    "replay_counts",
    "top_k",
    "seeds",
)
FLOATS = ("temperature", "top_p", "min_p")
PADDING = {"sources": KNOWN, "positions": -1, "state_indices": -1, "slot_mapping": -1, "top_p": 1.0}
"""Of a row that is none; 0 for the other fields."""


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: few, and none wastes more than a third of its rows beyond 8."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    sizes += range(320, max_num_seqs, 64)
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True)
class _Fields:
    """The fixed memory of a step's rows, on the device, or one step's on the host: views of one buffer."""

    buffer: torch.Tensor
    ints: torch.Tensor
    floats: torch.Tensor
    flushes: torch.Tensor

    @classmethod
    def of(cls, rows: int, **where: object) -> "_Fields":
        sizes = [len(INTS) * rows * 8, len(FLOATS) * rows * 4, rows]
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, **where)
        ints, floats, flushes = buffer.split(sizes)
        return cls(
            buffer,
            ints.view(torch.int64).view(len(INTS), rows),
            floats.view(torch.float32).view(len(FLOATS), rows),
            flushes.view(torch.bool),
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.ints[INTS.index(name)] if name in INTS else self.floats[FLOATS.index(name)]


class DecodeGraphs:
    """Graphs over one model, one arena and one buffer of draws."""

    def __init__(
        self,
        forward: Callable[[StepBatch], torch.Tensor],
        compute_logits: Callable[..., torch.Tensor],
        storage: ArenaStorage,
        drawn: torch.Tensor,
        *,
        vocabulary: VocabularyShard,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """forward: a batch to hidden states. compute_logits: with `out`, fp32 [rows, the shard's ids].

        drawn: int64 [2, max_num_seqs], tokens and finite flags of the last step.
        """
        self._forward = forward
        self._compute_logits = compute_logits
        self._window = storage.layout.unit.replay_window
        self._drawn = drawn
        self._vocabulary = vocabulary
        self._buckets = decode_buckets(drawn.shape[1])
        self._rows = math.ceil(self._buckets[-1] / ROW_ALIGN) * ROW_ALIGN
        self._fields = _Fields.of(self._rows, device=device)
        pages = max(1, storage.layout.pages_for(max_model_len))
        self._tables = torch.zeros(self._rows, pages, dtype=torch.int32, device=device)
        self._logits = torch.empty(self._rows, vocabulary.count, dtype=torch.float32, device=device)
        self._always = torch.ones(self._rows, dtype=torch.bool, device=device)
        self._models: dict[int, CapturedGraph] = {}
        self._greedy: dict[int, CapturedGraph] = {}
        self._sampled: dict[int, CapturedGraph] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._models) + len(self._greedy) + len(self._sampled)

    def rehearse(self) -> None:
        """Do what capturing would launch, on padding alone and without reading what was drawn."""
        for bucket in self._buckets:
            take_drawn(self._fields["token_ids"][:bucket], self._drawn[0], self._fields["sources"][:bucket])
            self._run_model(bucket, self._fields["token_ids"][:bucket])
            self._draw_greedily(bucket)
            self._draw_sampled(bucket)

    def capture(self) -> None:
        """Capture all graphs, largest first, so that they share the largest one's memory."""
        self._stage_padding()
        pool = torch.cuda.graph_pool_handle()
        kinds = (
            (self._models, self._step_model),
            (self._greedy, self._draw_greedily),
            (self._sampled, self._draw_sampled),
        )
        buckets = self._buckets[::-1]
        for bucket in buckets:
            for _, body in kinds:
                body(bucket)
        for bucket in buckets:
            for graphs, body in kinds:
                graphs[bucket] = CapturedGraph(partial(body, bucket), pool, self._vocabulary.group)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step is decode rows alone that all draw, and not too many."""
        sequences = plan.sequences
        return (
            plan.num_decodes == len(sequences) <= self._buckets[-1]
            and all(s.sample is not None for s in sequences)
            and all(s.prompt_logprobs is None or not s.next_token_ids for s in sequences)
        )

    def run(self, arrays: StepArrays, specs: Sequence[SampleSpec], sampler: Sampler) -> Draws:
        """Queue a step that `takes` accepted; the draws are kept in `drawn`, too."""
        count = len(specs)
        bucket = next(size for size in self._buckets if size >= count)
        self.stage(arrays, SampleArrays.of(specs, self._vocabulary.vocab_size), bucket)
        self._models[bucket].replay()
        if any(s.params.logprobs is not None or edits_logits(s) for s in specs) or (
            self._vocabulary.group.size > 1 and any(map(has_filters, specs))
        ):
            draws = sampler.draw(self._logits[:count], specs)
            keep_drawn(draws.tokens, draws.finite, self._drawn)
            return draws
        graphs = self._greedy if all(s.params.greedy for s in specs) else self._sampled
        graphs[bucket].replay()
        return Draws(self._drawn[0, :count], self._drawn[1, :count])

    def stage(self, arrays: StepArrays, samples: SampleArrays, bucket: int) -> None:
        """Send a step's rows to the fixed memory, padded to the bucket."""
        count = len(arrays.tables)
        staged = _Fields.of(self._rows, pin_memory=True)
        ints, floats = staged.ints.numpy(), staged.floats.numpy()
        for names, table in ((INTS, ints), (FLOATS, floats)):
            for name, row in zip(names, table, strict=True):
                source = arrays if hasattr(arrays, name) else samples
                values = getattr(source, name)
                # without full attention there are no slots
                row[: len(values)] = values
                row[count:bucket] = PADDING.get(name, 0)
        staged.flushes.numpy()[:count] = arrays.replay_flushes
        self._fields.buffer.copy_(staged.buffer, non_blocking=True)
        width = max(map(len, arrays.tables))
        if width:
            tables = torch.empty(count, width, dtype=torch.int32, pin_memory=True)
            for row, pages in zip(tables.numpy(), arrays.tables, strict=True):
                row[: len(pages)] = pages
            self._tables[:count, :width].copy_(tables, non_blocking=True)

    def _stage_padding(self) -> None:
        for names, table in ((INTS, self._fields.ints), (FLOATS, self._fields.floats)):
            for name, row in zip(names, table, strict=True):
                row.fill_(PADDING.get(name, 0))

    def _step_model(self, bucket: int) -> None:
        token_ids, sources = (self._fields[name][:bucket] for name in ("token_ids", "sources"))
        self._run_model(bucket, take_drawn(token_ids, self._drawn[0], sources))

    def _run_model(self, bucket: int, token_ids: torch.Tensor) -> None:
        fields = self._fields
        replay = None
        if self._window:
            replay = ReplayRows(fields["replay_counts"][:bucket], fields.flushes[:bucket])
        batch = StepBatch(
            token_ids=token_ids,
            positions=fields["positions"][:bucket],
            num_decodes=bucket,
            query_lens=(1,) * bucket,
            # decode rows read their lengths from the positions
            context_lens=(0,) * bucket,
            has_initial_state=self._always[:bucket],
            state_indices=fields["state_indices"][:bucket],
            block_tables=self._tables[:bucket],
            slot_mapping=fields["slot_mapping"][:bucket],
            logits_indices=None,
            replay=replay,
        )
        self._compute_logits(self._forward(batch), out=self._logits[:bucket])

    def _draw_greedily(self, bucket: int) -> None:
        keep_drawn(*self._vocabulary.greedy(self._logits[:bucket]), self._drawn)

    def _draw_sampled(self, bucket: int) -> None:
        fields = self._fields
        names = ("temperature", "top_k", "top_p", "min_p", "seeds")
        draw = self._vocabulary.sample_seeded
        if self._vocabulary.group.size > 1:
            names, draw = ("temperature", "seeds"), self._vocabulary.sample_unfiltered
        options = (fields[name][:bucket] for name in names)
        # the token to draw follows the row's own
        positions = fields["positions"][:bucket] + 1
        drawn = draw(self._logits[:bucket], *options, positions)
        keep_drawn(*drawn, self._drawn)
