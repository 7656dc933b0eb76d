"""Steps on made-up sequences before the first real one: which kernels there will be, and how much memory.

Owns a small arena of its own while it lasts. What its sequences hold means nothing, and nobody reads it. Of
layers of a kind the first stands for all: the others would launch the same, in memory that is free again.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hybridserve.kernels.attention import CONTEXT_PIECES, FUSED_LENGTHS, build_plans, fused_length
from hybridserve.kernels.compilation import Launch, recorded_launches
from hybridserve.replicas.arena.arena import Arena, Copies
from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.engine.plan import SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, ModelConfig
from hybridserve.replicas.runner.runner import GraphLimits, Model, ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage
from hybridserve.replicas.sampling_params import SamplingParams

SHORT = 64
"""Tokens of a chunk that is only there to be there."""
FEW = 5
"""Numbers of sequences in a step that are all tried, from one on."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, logprobs=1),
    SamplingParams(temperature=0.0, logprobs=0, presence_penalty=0.1, logit_bias={0: 1.0}),
)
"""Between them, every kernel of the sampler."""


def sequence_counts(config: ModelConfig, device: torch.device, max_num_seqs: int) -> tuple[int, ...]:
    """How many sequences to try in a step, ascending.

    Linear attention's prefill has a form for each octave of its programs, heads times sequences, up to one a
    multiprocessor, and one beyond that.
    """
    heads = [mixer.total_num_v_heads for mixer in config.mixers if isinstance(mixer, LinearAttentionSpec)]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    beyond = processors // min(heads) + 1 if heads else 1
    octaves = (1 << n for n in range(beyond.bit_length()))
    counts = {*range(1, FEW + 1), *octaves, beyond}
    return tuple(sorted(count for count in counts if count <= max_num_seqs))


def prefill_sizes(chunk: int) -> list[int]:
    """Numbers of new tokens that have plans of their own outside of Triton, and the most, ascending.

    chunk: the most that a step takes of a sequence.
    """
    return sorted({chunk, *(length for length in FUSED_LENGTHS if length < chunk)})


def lone_prefills(chunk: int, max_model_len: int) -> list[tuple[int, int]]:
    """Prefills of one sequence, (new tokens, tokens before): one with each kind of context that there may be.

    chunk: new tokens, fewer where the model's length leaves room for no more. The kinds: no context; one that
    is shorter than the pieces that cuDNN attends; whole pieces; pieces and a rest.
    """
    room = max_model_len - 1

    def leaves_room(context: int) -> bool:
        """For as many new tokens that cuDNN attends them as it would the whole chunk."""
        return fused_length(min(chunk, room - context)) == fused_length(chunk)

    whole = sum(CONTEXT_PIECES)
    if not leaves_room(whole + 1):
        whole = CONTEXT_PIECES[-1]
    rest = SHORT if leaves_room(whole + SHORT) else 1
    # two new tokens at least: one is a decode row
    contexts = [c for c in (min(SHORT, room - 2), whole, whole + rest) if 0 < c <= room - 2]
    return [(chunk, 0), *((min(chunk, room - context), context) for context in contexts)]


class RehearsedModel(Model, Protocol):
    def shortened(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, the model has only these of its layers."""


@dataclass
class _Sequence:
    units: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Rehearsal:
    """Plans on a small arena, run by a runner of its own."""

    def __init__(
        self,
        model: RehearsedModel,
        config: ModelConfig,
        layout: ArenaLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self._chunk = min(max_num_batched_tokens, max_model_len - 1)
        self._sizes = prefill_sizes(self._chunk)
        self._max_model_len = max_model_len
        self._limits = GraphLimits(max_model_len, max_num_batched_tokens, dtype)
        # experts take tiles by their average number of rows, and no size of tile for less than an octave
        octaves = (SHORT << n for n in range(1, self._chunk.bit_length())) if config.moe is not None else ()
        self._between = tuple(size for size in octaves if size < self._chunk)
        self._counts = sequence_counts(config, device, max_num_seqs)
        # of sequences that are shorter than a step, so many make up the longest one
        self._full = min(max_num_batched_tokens // max(1, self._chunk), max_num_seqs)
        longest = max(layout.pages_for(new + before) for new, before in self._lone(self._sizes))
        longest = max(longest, self._full * layout.pages_for(self._chunk), layout.pages_for(SHORT + 1))
        pages = longest + self._counts[-1] * layout.pages_for(SHORT)
        units = max(self._counts[-1] + 1, self._full)
        self._arena = Arena(layout, layout.extents_for(units, pages))
        self._model, self._layers = model, config.distinct_layers
        self._mixers = [config.mixers[layer] for layer in self._layers]
        self._dtype, self._device = dtype, device
        storage = ArenaStorage(layout, self._arena.num_extents, self._mixers, dtype, device)
        self._runner = ModelRunner(model, storage, device, max_num_seqs=max(max_num_seqs, 2))
        self._storage = storage

    @torch.inference_mode()
    def launches(self) -> list[Launch]:
        """The kernels of every kind of step that there is, none of which runs."""
        with self._model.shortened(self._layers), recorded_launches() as found:
            for plan in self._plans():
                self._runner.submit(plan)
            for graphs in self._runner.make_graphs(self._limits):
                graphs.rehearse()
        return found

    def build_plans(self) -> None:
        """What libraries have to prepare for these steps; needs no kernel of ours."""
        for mixer in {m for m in self._mixers if isinstance(m, FullAttentionSpec)}:
            heads = (mixer.total_num_heads, mixer.total_num_kv_heads, mixer.head_dim)
            build_plans(*heads, self._dtype, self._device, self._chunk, self._max_model_len)

    def run(self) -> None:
        """The largest prefills, done; among them each that builds a plan outside of Triton."""
        with self._model.shortened(self._layers):
            for prefill in self._lone(self._sizes):
                self._runner.submit(self._plan([prefill])).result()
            for prompts in self._fullest():
                self._runner.submit(self._plan(prompts)).result()

    def _lone(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        return [one for size in sizes for one in lone_prefills(size, self._max_model_len)]

    def _fullest(self) -> list[list[tuple[int, int]]]:
        """The step of as many tokens as there may be, where it takes more than one sequence."""
        return [[(self._chunk, 0)] * self._full] if self._full > 1 else []

    def _plans(self) -> list[StepPlan]:
        # where the most tokens are no number that cuDNN takes, a smaller one shows what goes with cuDNN
        sizes = self._sizes[-1:] if fused_length(self._chunk) is not None else self._sizes[-2:]
        lone = [*self._lone(sizes), *((size, 0) for size in self._between)]
        short = [(SHORT, 0)] * self._counts[-1]
        mixed = [(1, SHORT), (SHORT, 0)]
        # of a single token every part of a projection is dense, for which the gated norm has a form
        single = [(1, 0)]
        counted = (short[:count] for count in self._counts)
        groups = [*([chunk] for chunk in lone), *counted, *self._fullest(), single, mixed]
        plans = [self._plan(group) for group in groups]
        plans += [self._plan(short[:1], sampling) for sampling in SAMPLINGS]
        moves = self._moves()
        return plans if moves is None else [*plans, moves]

    def _plan(
        self,
        lens: Sequence[tuple[int, int]],
        sampling: SamplingParams = SAMPLINGS[0],
        copies: Copies = Copies(),  # noqa: B008  frozen
    ) -> StepPlan:
        """One step of sequences of (new tokens, tokens before)."""
        held = [_Sequence() for _ in lens]
        layout = self._arena.layout
        for sequence, (new, before) in zip(held, lens, strict=True):
            fits = self._arena.allocate_unit(sequence.units) and self._arena.allocate_pages(
                layout.pages_for(new + before), sequence.pages
            )
            assert fits, "the rehearsal's arena is too small for its own plans"
        sequences = tuple(
            ScheduledSequence(
                request_id=f"rehearsal {at}",
                token_ids=[0] * new,
                context_len=before,
                unit=sequence.units[0] if sequence.units else -1,
                block_table=list(sequence.pages),
                sample=SampleSpec(sampling, 0, new + before, new + before, [0] * (new + before), ()),
            )
            for at, (sequence, (new, before)) in enumerate(zip(held, lens, strict=True))
        )
        for sequence in held:
            self._arena.release(sequence.units, sequence.pages)
        num_decodes = sum(new == 1 and before > 0 for new, before in lens)
        return StepPlan(0, sequences, num_decodes, copies)

    def _moves(self) -> StepPlan | None:
        """A step that first moves a unit and a page."""
        first, second = _Sequence(), _Sequence()
        for sequence in (first, second):
            self._arena.allocate_unit(sequence.units)
            self._arena.allocate_pages(min(1, self._arena.layout.pages_for(1)), sequence.pages)
        copies = Copies(
            tuple(zip(first.pages, second.pages, strict=True)),
            tuple(zip(first.units, second.units, strict=True)),
        )
        for sequence in (first, second):
            self._arena.release(sequence.units, sequence.pages)
        return self._plan([(SHORT, 0)], copies=copies)
