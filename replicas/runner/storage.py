"""The arena's bytes: one buffer, each layer's typed views into it, and the copies evacuation asks for."""

from collections.abc import Sequence

import torch

from hybridserve.kernels.copies import copy_rows, gather_rows, scatter_rows
from hybridserve.kernels.linear_attention.replay import ReplayRing
from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.arena.layout import FP32_BYTES, STATE_ALIGN, ArenaLayout, StateOffsets
from hybridserve.replicas.models.batch import KVCache, LayerCache, StateCache
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, MixerSpec


class ArenaStorage:
    """`num_extents` extents of `layout` on `device`; `mixers` are the shard's own, one a layer.

    The buffer is not cleared: nothing may read a byte that was not written for the request at hand.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        num_extents: int,
        mixers: Sequence[MixerSpec],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.buffer = torch.empty(num_extents * layout.extent_bytes, dtype=torch.uint8, device=device)
        self.caches: tuple[LayerCache, ...] = self._views(mixers, dtype)
        page_bytes, unit_bytes = layout.page.nbytes, layout.unit_bytes
        # windows as in the layers' views: a row may start at every slab, or every STATE_ALIGN bytes
        self._pages = (
            self._windows(self.buffer, 0, (page_bytes,), layout.page.slab_bytes) if page_bytes else None
        )
        self._units = self._windows(self.buffer, 0, (unit_bytes,), STATE_ALIGN) if unit_bytes else None

    def copy(self, copies: Copies) -> None:
        """Move evacuated pages and units, as if every source was read before any destination is written."""
        moves = [
            (windows, *zip(*((row(src), row(dst)) for src, dst in pairs), strict=True))
            for windows, pairs, row in (
                (self._pages, copies.pages, int),
                (self._units, copies.units, self.layout.state_index),
            )
            if pairs
        ]
        sources, targets = (self._extents_of(moves, side) for side in (1, 2))
        indexed = [(windows, self._index(source), self._index(target)) for windows, source, target in moves]
        if sources.isdisjoint(targets):
            for windows, source, target in indexed:
                copy_rows(windows, source, target)
            return
        gathered = [gather_rows(windows, source) for windows, source, _ in indexed]
        for (windows, _, target), rows in zip(indexed, gathered, strict=True):
            scatter_rows(windows, target, rows)

    def _extents_of(
        self, moves: Sequence[tuple[torch.Tensor, Sequence[int], Sequence[int]]], side: int
    ) -> set[int]:
        """The extents that the rows of one side of `moves` lie in; a row never crosses two."""
        return {row * move[0].stride(0) // self.layout.extent_bytes for move in moves for row in move[side]}

    def _views(self, mixers: Sequence[MixerSpec], dtype: torch.dtype) -> tuple[LayerCache, ...]:
        caches: list[LayerCache] = []
        num_full = num_linear = 0
        for spec in mixers:
            if isinstance(spec, FullAttentionSpec):
                caches.append(self._kv(num_full, spec, dtype))
                num_full += 1
            else:
                caches.append(self._state(num_linear, spec, dtype))
                num_linear += 1
        return tuple(caches)

    def _kv(self, layer: int, spec: FullAttentionSpec, dtype: torch.dtype) -> KVCache:
        page = self.layout.page
        shape = (page.page_size, spec.total_num_kv_heads, spec.head_dim)
        slab = page.slab_bytes // dtype.itemsize
        flat = self.buffer.view(dtype)
        first = page.first_slab(layer)
        num_slabs = flat.numel() // slab
        keys, values = (
            flat[at * slab : num_slabs * slab].view(num_slabs - at, *shape) for at in (first, first + 1)
        )
        return KVCache(keys, values, keys.flatten(0, 1), values.flatten(0, 1))

    def _state(self, layer: int, spec: LinearAttentionSpec, dtype: torch.dtype) -> StateCache:
        offsets = self.layout.unit.layers[layer]
        conv_dim = 2 * spec.total_key_dim + spec.total_value_dim
        recurrent_shape = (spec.total_num_v_heads, spec.head_v_dim, spec.head_k_dim)
        state_dtype: torch.dtype = getattr(torch, spec.state_dtype)
        recurrent = self._windows(
            self.buffer.view(state_dtype),
            offsets.recurrent // state_dtype.itemsize,
            recurrent_shape,
            STATE_ALIGN // state_dtype.itemsize,
        )
        conv = self._windows(
            self.buffer.view(dtype),
            offsets.conv // dtype.itemsize,
            (spec.conv_kernel, conv_dim),
            STATE_ALIGN // dtype.itemsize,
        )
        replay = self._replay(offsets, spec, dtype) if self.layout.unit.replay_window else None
        return StateCache(recurrent, conv, replay)

    def _replay(self, offsets: StateOffsets, spec: LinearAttentionSpec, dtype: torch.dtype) -> ReplayRing:
        window, fp32 = self.layout.unit.replay_window, self.buffer.view(torch.float32)
        return ReplayRing(
            self._windows(
                self.buffer.view(dtype),
                offsets.replay_k // dtype.itemsize,
                (spec.total_num_k_heads, window, spec.head_k_dim),
                STATE_ALIGN // dtype.itemsize,
            ),
            self._windows(
                fp32,
                offsets.replay_u // FP32_BYTES,
                (spec.total_num_v_heads, window, spec.head_v_dim),
                STATE_ALIGN // FP32_BYTES,
            ),
            self._windows(
                fp32,
                offsets.replay_g // FP32_BYTES,
                (spec.total_num_v_heads, window),
                STATE_ALIGN // FP32_BYTES,
            ),
        )

    def _windows(self, flat: torch.Tensor, offset: int, shape: tuple[int, ...], step: int) -> torch.Tensor:
        """Every window of `shape` that starts at `offset` plus a multiple of `step` elements: [N, *shape]."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        count = (flat.numel() - offset - strides[0] * shape[0]) // step + 1
        return flat.as_strided((count, *shape), (step, *strides), offset)

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(rows, dtype=torch.int64)
        if self.buffer.is_cuda:
            return index.pin_memory().to(self.buffer.device, non_blocking=True)
        return index
