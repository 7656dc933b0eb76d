"""Steps of some tokens, prefill chunks among them, with CUDA graphs for all that lies between mixers.

But for what a mixer's `meet` does no token knows of another, so all else of a layer, gates and norms of the
mixers included, can be captured for a fixed number of tokens and replayed with rows of padding behind. The
meetings, whose launches follow the sequences' lengths, lie between the replays. On a GPU one layer of a kind
meets as it does without graphs, and its launches are those of the others, with other addresses. All this is
for the host: a step of few tokens takes as long as its host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from hybridserve.replicas.models.batch import LayerCache, StepBatch
from hybridserve.replicas.models.qwen3_5 import Between
from hybridserve.replicas.models.specs import MixerSpec
from hybridserve.replicas.models.step import StepContext

if TYPE_CHECKING:
    # a CPU has no Triton
    from hybridserve.kernels.launch_tape import LaunchTape

FINE = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of tokens to capture: beyond 2,048 the GPU takes longer than its host does without graphs."""


PADDING_POSITION = -1
"""Of a row that is no token: experts then know it."""


class Mixer(Protocol):
    """A layer's mixer, in parts of which only `meet` knows of more than one token."""

    spec: MixerSpec
    projected_width: int
    mixed_width: int
    num_gates: int

    def prepare(self, projected: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """From [T, projected_width] fp32 [2, T, num_gates], in `out`; None where there are no gates."""

    def inputs(self, projected: torch.Tensor, prepared: torch.Tensor | None) -> tuple[torch.Tensor, ...]: ...

    def meet(
        self,
        inputs: tuple[torch.Tensor, ...],
        step: StepContext,
        cache: LayerCache,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, mixed_width], in `out`; updates the cache."""

    def own_tensors(self, cache: LayerCache) -> tuple[torch.Tensor, ...]:
        """All that `meet` reads or writes of the layer and its cache."""

    def finish(self, met: torch.Tensor, projected: torch.Tensor) -> torch.Tensor: ...


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


@dataclass(frozen=True)
class _Meeting:
    """A layer's, with what its launches depend on."""

    mixer: Mixer
    cache: LayerCache
    kind: int
    """Equal for layers whose launches differ in `addresses` alone."""
    addresses: tuple[int, ...]


def _meetings(mixers: Sequence[Mixer], caches: Sequence[LayerCache]) -> list[_Meeting]:
    kinds: dict[object, int] = {}
    found = []
    for mixer, cache in zip(mixers, caches, strict=True):
        own = mixer.own_tensors(cache)
        # a cache's first axis may be of any size, as no kernel knows it
        alike = tuple((x.dtype, x.shape[1:], x.stride(), x.data_ptr() % 16) for x in own)
        kind = kinds.setdefault((mixer.spec, alike), len(kinds))
        found.append(_Meeting(mixer, cache, kind, tuple(x.data_ptr() for x in own)))
    return found


class PieceGraphs:
    """For each bucket of tokens one graph a piece, over fixed memory for what mixers read and write."""

    def __init__(
        self, model: PieceModel, dtype: torch.dtype, device: torch.device, max_tokens: int, graph: GraphMaker
    ) -> None:
        self._model = model
        self._graph = graph
        self._mixers: list[Mixer] = [layer.mixer for layer in model.layers]
        self._buckets = tuple(size for size in FINE if size < max_tokens) + (min(max_tokens, FINE[-1]),)
        rows = self._buckets[-1]
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.full((rows,), PADDING_POSITION, dtype=torch.int64, device=device)
        self._projected = torch.zeros(
            rows * max(mixer.projected_width for mixer in self._mixers), dtype=dtype, device=device
        )
        self._met = torch.zeros(
            rows * max(mixer.mixed_width for mixer in self._mixers), dtype=dtype, device=device
        )
        gates = 2 * rows * max(mixer.num_gates for mixer in self._mixers)
        self._gates = torch.zeros(gates, dtype=torch.float32, device=device)
        self._meetings: list[_Meeting] = []
        self._caches: Sequence[LayerCache] | None = None
        """That `_meetings` are of."""
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
        self._token_ids[:count].copy_(batch.token_ids)
        self._token_ids[count:bucket].zero_()
        self._positions[:count].copy_(batch.positions)
        self._positions[count:bucket].fill_(PADDING_POSITION)
        pieces = self._pieces[bucket]
        pieces[0].replay()
        # the device has something to do meanwhile
        step = self._model.context(batch)
        tapes: dict[int, LaunchTape] = {}
        for meeting, piece in zip(self._meetings_with(caches), pieces[1:], strict=True):
            tape = tapes.get(meeting.kind)
            if tape is not None:
                tape.play(meeting.addresses)
            elif self._token_ids.is_cuda:
                tapes[meeting.kind] = self._recorded(meeting, bucket, count, step)
            else:
                self._meet(meeting, bucket, count, step)
            piece.replay()
        last = self._results[bucket][-1]
        assert last is not None
        return last.h[:count]

    def _meetings_with(self, caches: Sequence[LayerCache]) -> list[_Meeting]:
        if self._caches is not caches:
            self._meetings = _meetings(self._mixers, caches)
            self._caches = caches
        return self._meetings

    def _recorded(self, meeting: _Meeting, bucket: int, count: int, step: StepContext) -> "LaunchTape":
        from hybridserve.kernels.launch_tape import LaunchTape

        tape = LaunchTape(meeting.addresses)
        with tape.recording():
            self._meet(meeting, bucket, count, step)
        return tape

    def _meet(self, meeting: _Meeting, bucket: int, count: int, step: StepContext) -> None:
        mixer, gates = meeting.mixer, self._gates_of(bucket, meeting.mixer)
        prepared = gates if gates is None else gates[:, :count]
        inputs = mixer.inputs(self._projected_of(bucket, mixer)[:count], prepared)
        mixer.meet(inputs, step, meeting.cache, self._met_of(bucket, mixer)[:count])

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
            first = self._mixers[0]
            target = self._projected_of(bucket, first)
            results[0] = self._model.begin(self._token_ids[:bucket], target)
            first.prepare(target, self._gates_of(bucket, first))

        def proceed(layer: int) -> None:
            before, mixer = results[layer], self._mixers[layer]
            assert before is not None
            mixed = mixer.finish(self._met_of(bucket, mixer), self._projected_of(bucket, mixer))
            following = self._mixers[layer + 1] if layer + 1 < len(self._mixers) else None
            target = None if following is None else self._projected_of(bucket, following)
            positions = self._positions[:bucket]
            results[layer + 1] = self._model.proceed(layer, mixed, before.h, target, positions)
            if following is not None:
                following.prepare(target, self._gates_of(bucket, following))

        return [begin, *(partial(proceed, layer) for layer in range(len(self._mixers)))]

    # one layer's are no longer needed when the next one's are made, so all have the same memory

    def _projected_of(self, bucket: int, mixer: Mixer) -> torch.Tensor:
        width = mixer.projected_width
        return self._projected[: bucket * width].view(bucket, width)

    def _met_of(self, bucket: int, mixer: Mixer) -> torch.Tensor:
        return self._met[: bucket * mixer.mixed_width].view(bucket, mixer.mixed_width)

    def _gates_of(self, bucket: int, mixer: Mixer) -> torch.Tensor | None:
        count = mixer.num_gates
        return self._gates[: 2 * bucket * count].view(2, bucket, count) if count else None


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
