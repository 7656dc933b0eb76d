"""Where every byte of the arena lies: units, pages, slabs, extents, and their addresses.

Pure arithmetic over the layer specs of one shard (head counts already the shard's own). No tensors.

    slab    one layer's K (or V) of one page; the step of every page address
    page    `page_size` tokens of the KV of all full-attention layers
    unit    the recurrent and conv states of one sequence over all linear layers
    extent  the arena's grain, leased whole to units or to pages
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybridserve.replicas.models.specs import DTYPE_BYTES, FullAttentionSpec, LinearAttentionSpec, MixerSpec

STATE_ALIGN = 256
"""Bytes between two rows of a state view: every unit and every state inside it starts on a multiple."""
MIN_PAGES_PER_EXTENT = 32
FP32_BYTES = 4


@dataclass(frozen=True)
class StateOffsets:
    """Byte offsets inside a unit of one linear layer's parts, each a multiple of STATE_ALIGN.

    recurrent: the spec's `state_dtype` [num_v_heads, head_v_dim, head_k_dim]; conv: model dtype
    [kernel, conv_dim]; replay_k, replay_u, replay_g: the last inputs of the recurrence, head by head
    (`ReplayRing`), model dtype [num_k_heads, window, head_k_dim], fp32 [num_v_heads, window, head_v_dim] and
    fp32 [num_v_heads, window]; all equal to `end` without a window.
    """

    recurrent: int
    conv: int
    replay_k: int
    replay_u: int
    replay_g: int
    end: int


@dataclass(frozen=True)
class UnitLayout:
    """The states of one sequence: one StateOffsets a linear layer, in layer order."""

    layers: tuple[StateOffsets, ...]
    nbytes: int
    """Bytes used, before rounding to the arena's grain; 0 without linear layers."""
    replay_window: int
    """Inputs of the recurrence that the replay rings have room for; 0 for no rings."""


@dataclass(frozen=True)
class PageLayout:
    """The KV of `page_size` tokens: for each full-attention layer K, then V, one slab each."""

    page_size: int
    slab_bytes: int
    layer_bytes: tuple[int, ...]
    """Bytes of each full-attention layer in one page, multiples of `slab_bytes`."""

    @property
    def nbytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def num_slabs(self) -> int:
        return self.nbytes // self.slab_bytes if self.nbytes else 0

    def first_slab(self, layer: int) -> int:
        """Slab offset inside a page of the `layer`-th full-attention layer (its K; V is one slab further)."""
        return sum(self.layer_bytes[:layer]) // self.slab_bytes


@dataclass(frozen=True)
class ArenaLayout:
    """How extents are cut, and the address of every unit and page."""

    unit: UnitLayout
    page: PageLayout
    unit_bytes: int
    """A unit's step: `unit.nbytes` rounded up to lcm(STATE_ALIGN, slab)."""
    extent_bytes: int

    @property
    def units_per_extent(self) -> int:
        return self.extent_bytes // self.unit_bytes if self.unit_bytes else 0

    @property
    def pages_per_extent(self) -> int:
        return self.extent_bytes // self.page.nbytes if self.page.nbytes else 0

    @property
    def slabs_per_extent(self) -> int:
        return self.extent_bytes // self.page.slab_bytes if self.page.nbytes else 0

    def page_entry(self, extent: int, slot: int) -> int:
        """`block_table` entry of a page: its first slab, counted from the arena's start."""
        return extent * self.slabs_per_extent + slot * self.page.num_slabs

    def unit_id(self, extent: int, slot: int) -> int:
        return extent * self.units_per_extent + slot

    def unit_offset(self, unit: int) -> int:
        """Byte address of a unit."""
        extent, slot = divmod(unit, self.units_per_extent)
        return extent * self.extent_bytes + slot * self.unit_bytes

    def state_index(self, unit: int) -> int:
        """Row of a state view: the unit's address in steps of STATE_ALIGN bytes; 0 without linear layers."""
        return self.unit_offset(unit) // STATE_ALIGN if self.unit_bytes else 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens; 0 without full-attention layers."""
        return -(-num_tokens // self.page.page_size) if self.page.nbytes else 0

    def extents_for(self, units: int, pages: int) -> int:
        """Extents that `units` units and `pages` pages need when packed."""
        extents = -(-units // self.units_per_extent) if self.unit_bytes else 0
        return extents + (-(-pages // self.pages_per_extent) if self.page.nbytes else 0)


def plan_arena(
    mixers: Sequence[MixerSpec], dtype_bytes: int, page_size: int, replay_window: int = 0
) -> ArenaLayout:
    """Lay out the arena of a shard whose layers are `mixers`.

    KV and conv states take `dtype_bytes` an element; `replay_window` inputs of the recurrence are kept.

    Raises:
        ValueError: full-attention layers differ in what one page of them takes.
    """
    unit = _plan_unit([m for m in mixers if isinstance(m, LinearAttentionSpec)], dtype_bytes, replay_window)
    page = _plan_page([m for m in mixers if isinstance(m, FullAttentionSpec)], dtype_bytes, page_size)
    grain = math.lcm(STATE_ALIGN, page.slab_bytes) if page.nbytes else STATE_ALIGN
    unit_bytes = _round_up(unit.nbytes, grain)
    extent_bytes = _round_up(max(unit_bytes, MIN_PAGES_PER_EXTENT * page.nbytes), grain)
    return ArenaLayout(unit, page, unit_bytes, extent_bytes)


def _plan_unit(layers: Sequence[LinearAttentionSpec], dtype_bytes: int, replay_window: int) -> UnitLayout:
    offsets, at = [], 0
    for spec in layers:
        conv_dim = 2 * spec.total_key_dim + spec.total_value_dim
        recurrent = spec.total_num_v_heads * spec.head_v_dim * spec.head_k_dim * DTYPE_BYTES[spec.state_dtype]
        sizes = (
            recurrent,
            spec.conv_kernel * conv_dim * dtype_bytes,
            replay_window * spec.total_key_dim * dtype_bytes,
            replay_window * spec.total_value_dim * FP32_BYTES,
            replay_window * spec.total_num_v_heads * FP32_BYTES,
        )
        starts = list(accumulate((_round_up(size, STATE_ALIGN) for size in sizes), initial=at))
        offsets.append(StateOffsets(*starts))
        at = starts[-1]
    return UnitLayout(tuple(offsets), at, replay_window)


def _plan_page(layers: Sequence[FullAttentionSpec], dtype_bytes: int, page_size: int) -> PageLayout:
    slabs = {page_size * m.total_num_kv_heads * m.head_dim * dtype_bytes for m in layers}
    if len(slabs) > 1:
        raise ValueError(f"full-attention layers differ in KV bytes a page: {sorted(slabs)}")
    slab = slabs.pop() if slabs else 1
    return PageLayout(page_size, slab, (2 * slab,) * len(layers))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
