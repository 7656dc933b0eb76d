"""Which heads a shard holds, and which of their channels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.parallel.heads import SPLITS, check_divides, divide, shard_heads, shard_value_heads


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_every_head_is_held_once_and_finds_its_shared_head(shared, ratio, data) -> None:
    total = shared * ratio
    size = data.draw(st.sampled_from([s for s in range(1, total + 1) if total % s == 0]))
    held = []
    for rank in range(size):
        shard = shard_heads("heads", total, shared, rank, size)
        held.extend(shard.heads)
        assert shard.num_heads % shard.num_shared_heads == 0
        local_ratio = shard.num_heads // shard.num_shared_heads
        for local, head in enumerate(shard.heads):
            assert shard.shared_heads[local // local_ratio] == head // ratio
    assert held == list(range(total))


@pytest.mark.parametrize(
    ("heads", "shared", "size", "rank", "expected"),
    [
        (32, 16, 2, 1, tuple(range(8, 16))),
        (8, 2, 4, 3, (1,)),
        (8, 2, 8, 0, (0,)),
        (12, 4, 6, 1, (0, 1)),
    ],
)
def test_shared_heads_are_replicated_as_needed(heads, shared, size, rank, expected) -> None:
    assert shard_heads("heads", heads, shared, rank, size).shared_heads == expected


def test_a_size_that_does_not_divide_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="tp_size 5 does not divide num_heads 12; .* is 4 or 6"):
        divide("num_heads", 12, 5)
    with pytest.raises(ValueError, match="tp_size 16 does not divide num_heads 12; .* is 12"):
        shard_heads("num_heads", 12, 3, 0, 16)


def test_the_nearest_size_divides_all() -> None:
    with pytest.raises(ValueError, match="tp_size 4 does not divide a 30 and c 18; .* is 3 or 6"):
        check_divides([("a", 30), ("b", 24), ("c", 18)], 4)
    check_divides([("a", 30), ("b", 24)], 6)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.sampled_from(SPLITS), st.data())
def test_every_channel_is_held_once(shared, ratio, head_dim, split, data) -> None:
    total = shared * ratio
    sizes = [s for s in range(1, total * head_dim + 1) if total * head_dim % s == 0]
    size = data.draw(st.sampled_from(sizes))
    held = []
    for rank in range(size):
        shard = shard_value_heads("channels", total, shared, head_dim, rank, size, split)
        start, end = shard.channels(head_dim)
        held.extend(head * head_dim + channel for head in shard.heads for channel in range(start, end))
        local_ratio = shard.num_heads // shard.num_shared_heads
        for local, head in enumerate(shard.heads):
            assert shard.shared_heads[local // local_ratio] == head // ratio
    assert sorted(held) == list(range(total * head_dim))


@pytest.mark.parametrize(
    ("split", "size", "num_heads", "num_parts"),
    [
        ("heads", 8, 4, 1),
        ("heads", 64, 1, 2),
        ("heads", 12, 8, 3),
        ("head_v_dim", 8, 32, 8),
        ("head_v_dim", 12, 32, 12),
    ],
)
def test_what_is_cut_first(split, size, num_heads, num_parts) -> None:
    shard = shard_value_heads("channels", 32, 16, 96, 0, size, split)
    assert (shard.num_heads, shard.num_parts) == (num_heads, num_parts)


def test_a_size_that_divides_neither() -> None:
    with pytest.raises(ValueError, match="tp_size 10 does not divide channels 32; .* is 8 or 16"):
        shard_value_heads("channels", 4, 2, 8, 0, 10, "heads")
