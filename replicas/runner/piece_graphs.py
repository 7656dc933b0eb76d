"""Steps of some tokens, prefill chunks among them, with CUDA graphs for all that lies between mixers.

Between two mixers no token knows of another, so that part of a layer can be captured for a fixed number of
tokens and replayed with rows of padding behind. The mixers, whose launches follow the sequences' lengths, run
as they do without graphs, each between two replays. It spares the host two thirds of a step's launches: a
step of few tokens takes as long as its host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from hybridserve.replicas.models.batch import LayerCache, StepBatch
from hybridserve.replicas.models.qwen3_5 import Between
from hybridserve.replicas.models.step import StepContext

FINE = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of tokens to capture: beyond 2,048 the GPU takes longer than its host does without graphs."""


PADDING_POSITION = -1
"""Of a row that is no token: experts then know it."""


class PieceModel(Protocol):
    """A model that can be run from mixer to mixer."""

    def context(self, batch: StepBatch) -> StepContext: ...

    def begin(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> Between: ...

    def proceed(
        self,
        layer: int,
        mixed: torch.Tensor,
        h: torch.Tensor,
        out: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Between: ...

    @property
    def layers(self) -> Sequence[torch.nn.Module]: ...


class Replayable(Protocol):
    def replay(self) -> None: ...


GraphMaker = Callable[[Callable[[], None], object], Replayable]
"""(body, memory pool) -> what does again, without the host's part, what body did; it has run once before."""


class PieceGraphs:
    """For each bucket of tokens one graph a piece, over fixed memory for what mixers read and write."""

    def __init__(
        self, model: PieceModel, dtype: torch.dtype, device: torch.device, max_tokens: int, graph: GraphMaker
    ) -> None:
        self._model = model
        self._graph = graph
        self._mixers = [layer.mixer for layer in model.layers]
        self._buckets = tuple(size for size in FINE if size < max_tokens) + (min(max_tokens, FINE[-1]),)
        rows = self._buckets[-1]
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.full((rows,), PADDING_POSITION, dtype=torch.int64, device=device)
        self._projected = torch.zeros(
            rows * max(mixer.projected_width for mixer in self._mixers), dtype=dtype, device=device
        )
        self._mixed = torch.zeros(
            rows * max(mixer.mixed_width for mixer in self._mixers), dtype=dtype, device=device
        )
        self._pieces: dict[int, list[Replayable]] = {}
        self._results: dict[int, list[Between | None]] = {}

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._pieces.values()))

    def capture(self) -> None:
        """Capture all buckets, largest first, so that they share the largest one's memory."""
        pool = torch.cuda.graph_pool_handle() if self._token_ids.is_cuda else None
        if pool is not None:
            self.rehearse()
        for bucket in reversed(self._buckets):
            self._capture(bucket, pool)

    def rehearse(self) -> None:
        """Do what capturing would launch."""
        for bucket in reversed(self._buckets):
            results: list[Between | None] = [None] * (len(self._mixers) + 1)
            for number, body in enumerate(self._bodies(bucket, results)):
                body()
                if number > 0:
                    # the next one does not read it
                    results[number - 1] = None

    def takes(self, num_tokens: int) -> bool:
        return num_tokens <= self._buckets[-1]

    def forward(self, batch: StepBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """As the model's own; the result is overwritten by the next call."""
        count = batch.num_tokens
        bucket = next(size for size in self._buckets if size >= count)
        step = self._model.context(batch)
        self._token_ids[:count].copy_(batch.token_ids)
        self._token_ids[count:bucket].zero_()
        self._positions[:count].copy_(batch.positions)
        self._positions[count:bucket].fill_(PADDING_POSITION)
        pieces = self._pieces[bucket]
        pieces[0].replay()
        for mixer, cache, piece in zip(self._mixers, caches, pieces[1:], strict=True):
            projected = self._view(self._projected, bucket, mixer.projected_width)
            mixed = self._view(self._mixed, bucket, mixer.mixed_width)
            mixed[:count].copy_(mixer.mix(projected[:count], step, cache))
            piece.replay()
        last = self._results[bucket][-1]
        assert last is not None
        return last.h[:count]

    def _capture(self, bucket: int, pool: object) -> None:
        results: list[Between | None] = [None] * (len(self._mixers) + 1)
        pieces = []
        for number, body in enumerate(self._bodies(bucket, results)):
            pieces.append(self._graph(body, pool))
            if pool is not None and number > 0:
                # a graph knows its addresses: what the next piece will not read is memory for it
                results[number - 1] = None
        self._pieces[bucket], self._results[bucket] = pieces, results

    def _bodies(self, bucket: int, results: list[Between | None]) -> list[Callable[[], None]]:
        """The pieces in order; piece i leaves its result in `results[i]`, from where the next one goes on."""

        def begin() -> None:
            results[0] = self._model.begin(self._token_ids[:bucket], self._target(bucket, 0))

        def proceed(layer: int) -> None:
            before = results[layer]
            assert before is not None
            mixed = self._view(self._mixed, bucket, self._mixers[layer].mixed_width)
            target, positions = self._target(bucket, layer + 1), self._positions[:bucket]
            results[layer + 1] = self._model.proceed(layer, mixed, before.h, target, positions)

        return [begin, *(partial(proceed, layer) for layer in range(len(self._mixers)))]

    def _target(self, bucket: int, layer: int) -> torch.Tensor | None:
        if layer == len(self._mixers):
            return None
        return self._view(self._projected, bucket, self._mixers[layer].projected_width)

    @staticmethod
    def _view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        return flat[: rows * width].view(rows, width)


class _Again:
    """In place of a graph where there are none: does it again."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


def plain_repeat(body: Callable[[], None], pool: object) -> Replayable:
    """For tests on a CPU."""
    body()
    return _Again(body)
