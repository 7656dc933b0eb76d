"""Views of the arena's buffer: every row lies where the layout says, and copies move exactly their bytes."""

from dataclasses import replace

import pytest
import torch

from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.arena.layout import STATE_ALIGN, plan_arena
from hybridserve.replicas.models.batch import KVCache, StateCache
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec
from hybridserve.replicas.runner.storage import ArenaStorage

MIXERS = (
    LinearAttentionSpec(1, 2, 24, 40, 4),
    FullAttentionSpec(4, 2, 24, 8, 1e4),
    LinearAttentionSpec(1, 2, 24, 40, 4),
    FullAttentionSpec(4, 2, 24, 8, 1e4),
)
EXTENTS = 3


@pytest.fixture(
    params=[(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "bfloat16")], ids=str
)
def storage(request):
    dtype, state_dtype = request.param
    mixers = [
        replace(spec, state_dtype=state_dtype) if isinstance(spec, LinearAttentionSpec) else spec
        for spec in MIXERS
    ]
    layout = plan_arena(mixers, dtype.itemsize, 16, replay_window=4)
    assert layout.units_per_extent > 1
    storage = ArenaStorage(layout, EXTENTS, mixers, dtype, torch.device("cpu"))
    storage.buffer.fill_(0xFF)
    return storage


def written(storage):
    """Byte addresses that are no longer 0xFF."""
    return (storage.buffer != 0xFF).nonzero().flatten()


def views_of(cache):
    if isinstance(cache, KVCache):
        return tuple(vars(cache).values())
    return cache.recurrent, cache.conv, *vars(cache.replay).values()


def test_each_page_row_of_each_layer_is_its_own_slab(storage):
    layout = storage.layout
    slots = (0, 1, layout.pages_per_extent - 1)
    entries = [layout.page_entry(e, j) for e in range(EXTENTS) for j in slots]
    caches = [c for c in storage.caches if isinstance(c, KVCache)]
    for entry in entries:
        for layer, cache in enumerate(caches):
            for half, rows in enumerate((cache.keys, cache.values)):
                rows[entry] = 0
                touched = written(storage)
                start = (entry + layout.page.first_slab(layer) + half) * layout.page.slab_bytes
                assert touched.tolist() == list(range(start, start + layout.page.slab_bytes))
                storage.buffer.fill_(0xFF)


def test_slots_are_the_tokens_of_the_page_rows(storage):
    cache = next(c for c in storage.caches if isinstance(c, KVCache))
    entry = storage.layout.page_entry(1, 2)
    for offset in (0, 7, 15):
        cache.key_slots[entry * 16 + offset] = offset
        cache.value_slots[entry * 16 + offset] = offset + 1
        assert (cache.keys[entry, offset] == offset).all()
        assert (cache.values[entry, offset] == offset + 1).all()


def test_each_unit_row_of_each_layer_lies_inside_its_unit(storage):
    layout = storage.layout
    seen = set()
    caches = [c for c in storage.caches if isinstance(c, StateCache)]
    for unit in range(EXTENTS * layout.units_per_extent):
        row = layout.state_index(unit)
        low = layout.unit_offset(unit)
        assert row * STATE_ALIGN == low
        for cache, offsets in zip(caches, layout.unit.layers, strict=True):
            starts = (offsets.recurrent, offsets.conv, offsets.replay_k, offsets.replay_u, offsets.replay_g)
            for view, start in zip(views_of(cache), starts, strict=True):
                storage.buffer.fill_(0xFF)
                view[row] = 0
                touched = written(storage).tolist()
                size = view[row].numel() * view.element_size()
                assert touched == list(range(low + start, low + start + size))
                assert not seen & set(touched), "two states share bytes"
                seen |= set(touched)


def test_views_reach_the_last_extent_and_not_past_the_buffer(storage):
    for cache in storage.caches:
        for view in views_of(cache):
            last = view[-1]
            end = last.storage_offset() + last.numel()
            assert end * last.element_size() <= storage.buffer.numel()


def test_copies_read_every_source_before_any_write(storage):
    layout = storage.layout
    cache = next(c for c in storage.caches if isinstance(c, KVCache))
    states = next(c for c in storage.caches if isinstance(c, StateCache))
    pages = [layout.page_entry(0, j) for j in range(4)]
    units = [extent * layout.units_per_extent for extent in (1, 2)]
    for number, entry in enumerate(pages):
        cache.keys[entry] = number
    for number, unit in enumerate(units):
        states.recurrent[layout.state_index(unit)] = number
    # a swap, and a chain: wrong unless all sources are read first
    storage.copy(
        Copies(
            pages=((pages[0], pages[1]), (pages[1], pages[0]), (pages[3], pages[2])),
            units=((units[0], units[1]), (units[1], units[0])),
        )
    )
    assert [cache.keys[entry].unique().item() for entry in pages] == [1, 0, 3, 3]
    assert [states.recurrent[layout.state_index(u)].unique().item() for u in units] == [1, 0]


def test_copies_touch_nothing_else(storage):
    layout = storage.layout
    source, target = layout.page_entry(0, 0), layout.page_entry(2, 1)
    start = source * layout.page.slab_bytes
    storage.buffer[start : start + layout.page.nbytes] = 1
    storage.copy(Copies(pages=((source, target),)))
    low = target * layout.page.slab_bytes
    expected = [*range(start, start + layout.page.nbytes), *range(low, low + layout.page.nbytes)]
    assert written(storage).tolist() == sorted(expected)
