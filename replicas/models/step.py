"""One step as the mixers see it: its runs of sequences that take the same kernels, and what all layers share.

Computed once a step, so that no layer repeats it. Knows nothing of what a mixer does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from hybridserve.replicas.models.batch import LayerCache, ReplayRows, StepBatch


class Phase(Enum):
    """Which form of a mixer computes a sequence's tokens."""

    DECODE = "decode"
    """One token a sequence, from the cache: the recurrent form."""
    PREFILL = "prefill"
    """Any number of tokens a sequence, ragged: the chunkwise form."""


@dataclass(frozen=True)
class PhaseBatch:
    """Neighbouring sequences of a step that are in the same phase; fields are `StepBatch`'s, cut to them."""

    phase: Phase
    tokens: slice
    """Their tokens among the step's."""
    positions: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seq_lens: tuple[int, ...] | torch.Tensor
    """Context and new tokens together. Of decode rows on a GPU int64 [S] there, as what reads them must not
    wait for the host; else numbers."""
    has_initial_state: torch.Tensor
    state_indices: torch.Tensor
    block_tables: torch.Tensor
    replay: ReplayRows | None
    """None for prefill chunks, and where the arena has no rings."""


@dataclass(frozen=True)
class StepContext:
    """What every layer of a step is given beside its input."""

    phases: tuple[PhaseBatch, ...]
    """One or two, in the order of the tokens."""
    slot_mapping: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    """cos and sin, fp32 [T, rotary_dim // 2]; None for models without full attention."""

    @property
    def has_prefill(self) -> bool:
        return self.phases[-1].phase is Phase.PREFILL

    @property
    def decodes(self) -> PhaseBatch | None:
        """The step, where it has decode rows alone."""
        return None if self.has_prefill else self.phases[0]


def split_phases(batch: StepBatch) -> tuple[PhaseBatch, ...]:
    """The step's decode rows and its prefill chunks, leaving out whichever there are none of."""
    num_decodes, num_sequences = batch.num_decodes, len(batch.query_lens)
    # cutting costs operations, so a step of one phase is passed on as it is
    if num_decodes == num_sequences:
        return (_cut(batch, Phase.DECODE, slice(None), slice(None)),)
    if num_decodes == 0:
        return (_cut(batch, Phase.PREFILL, slice(None), slice(None)),)
    return (
        _cut(batch, Phase.DECODE, slice(0, num_decodes), slice(0, num_decodes)),
        _cut(batch, Phase.PREFILL, slice(num_decodes, num_sequences), slice(num_decodes, batch.num_tokens)),
    )


def _cut(batch: StepBatch, phase: Phase, sequences: slice, tokens: slice) -> PhaseBatch:
    query_lens, context_lens = batch.query_lens[sequences], batch.context_lens[sequences]
    positions = batch.positions[tokens]
    seq_lens: tuple[int, ...] | torch.Tensor = tuple(
        q + c for q, c in zip(query_lens, context_lens, strict=True)
    )
    if phase is Phase.DECODE and positions.device.type != "cpu":
        seq_lens = positions + 1
    return PhaseBatch(
        phase=phase,
        tokens=tokens,
        positions=positions,
        query_lens=query_lens,
        context_lens=context_lens,
        seq_lens=seq_lens,
        has_initial_state=batch.has_initial_state[sequences],
        state_indices=batch.state_indices[sequences],
        block_tables=batch.block_tables[sequences],
        replay=batch.replay if phase is Phase.DECODE else None,
    )


MixerKernel = Callable[..., torch.Tensor]
"""(mixer, its flat inputs …, PhaseBatch, LayerCache, out) -> [tokens of the phase, …]: `out` itself, where it
could write to one."""

KernelTable = Mapping[tuple[Phase, str], MixerKernel]
"""Which function computes a phase on which type of device."""


def run_phases(
    step: StepContext,
    kernels: KernelTable,
    mixer: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    cache: LayerCache,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each phase with its kernel and return all tokens' results, [T, …], in `out` where it is given.
    `inputs` are [T, …] each."""
    device = inputs[0].device.type
    if len(step.phases) == 1:
        (phase,) = step.phases
        made = kernels[phase.phase, device](mixer, *inputs, phase, cache, out)
        return made if out is None or made is out else out.copy_(made)
    parts = [out if out is None else out[phase.tokens] for phase in step.phases]
    made_parts = [
        kernels[phase.phase, device](mixer, *(x[phase.tokens] for x in inputs), phase, cache, part)
        for phase, part in zip(step.phases, parts, strict=True)
    ]
    if out is None:
        return torch.cat(made_parts)
    for part, made in zip(parts, made_parts, strict=True):
        if made is not part:
            part.copy_(made)
    return out
