"""`shard_heads` and `divide`: which heads a shard holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.parallel.heads import divide, shard_heads


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
