"""Clamps and refusals carry numbers that are true: each is checked by filling an arena."""

import pytest

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.sizing import (
    describe_capacity,
    longest_sequence,
    plan_capacity,
    sequences_that_fit,
)

from .conftest import MIXERS


@pytest.mark.parametrize("mix", sorted(MIXERS))
@pytest.mark.parametrize("extents", [2, 3, 11])
@pytest.mark.parametrize("tokens", [1, 100, 700])
def test_sequences_that_fit_is_what_an_arena_takes(mix, extents, tokens):
    layout = plan_arena(MIXERS[mix], 4, 16)
    arena = Arena(layout, extents)
    held = []
    while arena.fits(1, layout.pages_for(tokens)):
        held.append(([], []))
        assert arena.allocate_unit(held[-1][0])
        assert arena.allocate_pages(layout.pages_for(tokens), held[-1][1])
    assert len(held) == sequences_that_fit(layout, extents, tokens)


@pytest.mark.parametrize("mix", ["hybrid", "small units", "full only"])
def test_longest_sequence_fits_and_one_token_more_does_not(mix):
    layout = plan_arena(MIXERS[mix], 4, 16)
    longest = longest_sequence(layout, 5)
    assert Arena(layout, 5).fits(1, layout.pages_for(longest))
    assert not Arena(layout, 5).fits(1, layout.pages_for(longest + 1))


def capacity(extents, **limits):
    layout = plan_arena(MIXERS["hybrid"], 4, 16)
    limits = {"model_max_len": 5000, "max_model_len": None, "max_num_seqs": 256} | limits
    return layout, plan_capacity(layout, extents * layout.extent_bytes + 17, **limits)


def test_limits_are_clamped_to_the_arena():
    layout, found = capacity(4)
    assert found.num_extents == 4
    assert found.max_num_seqs == 3
    assert found.max_model_len == 3 * layout.pages_per_extent * 16 < 5000
    assert f"2 of 1024, 1 of {found.max_model_len}" in describe_capacity(layout, found)
    _, found = capacity(40, max_num_seqs=2)
    assert (found.max_num_seqs, found.max_model_len) == (2, 5000)


def test_what_cannot_be_had_is_refused_with_both_numbers():
    layout = plan_arena(MIXERS["hybrid"], 4, 16)
    with pytest.raises(ValueError, match=f"one page takes {2 * layout.extent_bytes} bytes"):
        capacity(1)
    with pytest.raises(ValueError, match="max_model_len is 1, but a prompt and its answer take 2"):
        capacity(40, max_model_len=1)
    with pytest.raises(ValueError, match="max_model_len is 6000, but the model's own limit is 5000"):
        capacity(40, max_model_len=6000)
    longest = longest_sequence(layout, 2)
    with pytest.raises(
        ValueError, match=f"max_model_len is {longest + 1}.* holds one sequence of {longest} tok"
    ):
        capacity(2, max_model_len=longest + 1)
