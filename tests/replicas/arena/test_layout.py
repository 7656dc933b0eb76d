"""The arena's arithmetic, against the sizes known for real models and against overlap."""

from dataclasses import replace

import pytest

from hybridserve.replicas.arena.layout import STATE_ALIGN, plan_arena
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec

QWEN_9B = (
    *(LinearAttentionSpec(16, 32, 128, 128, 4),) * 24,
    *(FullAttentionSpec(16, 4, 256, 64, 1e7),) * 8,
)
ODD = (
    LinearAttentionSpec(3, 6, 40, 24, 4),
    FullAttentionSpec(6, 3, 24, 6, 1e4),
    LinearAttentionSpec(1, 1, 16, 8, 2),
)


def test_qwen_9b_unit_and_pages_are_the_known_sizes():
    layout = plan_arena(QWEN_9B, dtype_bytes=2, page_size=16)
    assert layout.unit.nbytes == 24 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)
    assert layout.units_per_extent == 1
    assert layout.pages_per_extent == 99


def test_bf16_states_take_half():
    mixers = [
        replace(m, state_dtype="bfloat16") if isinstance(m, LinearAttentionSpec) else m for m in QWEN_9B
    ]
    layout = plan_arena(mixers, dtype_bytes=2, page_size=16)
    assert layout.unit.nbytes == 24 * (32 * 128 * 128 * 2 + 4 * 8192 * 2)


def test_a_model_of_small_states_carves_several_units_from_an_extent():
    layout = plan_arena(ODD, dtype_bytes=4, page_size=16)
    assert layout.units_per_extent > 1
    assert layout.pages_per_extent >= 32


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("mixers", [QWEN_9B, ODD])
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_parts_of_a_unit_are_aligned_and_do_not_overlap(mixers, window, dtype_bytes):
    layout = plan_arena(mixers, dtype_bytes, 16, replay_window=window)
    at = 0
    linear = [m for m in mixers if isinstance(m, LinearAttentionSpec)]
    for spec, offsets in zip(linear, layout.unit.layers, strict=True):
        conv_dim = 2 * spec.total_num_k_heads * spec.head_k_dim + spec.total_num_v_heads * spec.head_v_dim
        starts = (
            offsets.recurrent,
            offsets.conv,
            offsets.replay_k,
            offsets.replay_u,
            offsets.replay_g,
            offsets.end,
        )
        sizes = (
            spec.total_num_v_heads * spec.head_v_dim * spec.head_k_dim * 4,
            spec.conv_kernel * conv_dim * dtype_bytes,
            window * spec.total_num_k_heads * spec.head_k_dim * dtype_bytes,
            window * spec.total_num_v_heads * spec.head_v_dim * 4,
            window * spec.total_num_v_heads * 4,
        )
        assert offsets.recurrent == at
        for start, size, following in zip(starts, sizes, starts[1:], strict=False):
            assert start % STATE_ALIGN == 0 and start + size <= following < start + size + STATE_ALIGN
        at = offsets.end
    assert layout.unit.nbytes == at and layout.unit.replay_window == window


@pytest.mark.parametrize("mixers", [QWEN_9B, ODD])
def test_addresses_of_an_extents_slots_stay_inside_it_and_apart(mixers):
    layout = plan_arena(mixers, 2, 16)
    slab = layout.page.slab_bytes
    for extent in (0, 1, 1700):
        low, high = extent * layout.extent_bytes, (extent + 1) * layout.extent_bytes
        starts = [layout.page_entry(extent, j) * slab for j in range(layout.pages_per_extent)]
        assert all(low <= s and s + layout.page.nbytes <= high for s in starts)
        assert all(b - a == layout.page.nbytes for a, b in zip(starts, starts[1:], strict=False))
        units = [layout.unit_id(extent, j) for j in range(layout.units_per_extent)]
        offsets = [layout.unit_offset(u) for u in units]
        assert all(low <= o and o + layout.unit.nbytes <= high and o % STATE_ALIGN == 0 for o in offsets)
        assert [layout.state_index(u) * STATE_ALIGN for u in units] == offsets


def test_models_of_one_kind_of_layer_have_only_that_tenant():
    linear = plan_arena(QWEN_9B[:24], 2, 16)
    assert linear.pages_per_extent == 0 and linear.units_per_extent == 1 and linear.pages_for(10_000) == 0
    full = plan_arena(QWEN_9B[24:], 2, 16)
    assert full.units_per_extent == 0 and full.pages_per_extent == 32 and full.extents_for(5, 33) == 2


def test_layers_of_different_kv_size_are_refused():
    mixers = (FullAttentionSpec(4, 4, 64, 16, 1e4), FullAttentionSpec(4, 2, 64, 16, 1e4))
    with pytest.raises(ValueError, match="differ in KV bytes"):
        plan_arena(mixers, 2, 16)
