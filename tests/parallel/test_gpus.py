"""Collectives between real GPUs; needs two at least."""

from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("gpus_on_ranks.py")
COUNT = torch.cuda.device_count()
SIZES = [size for size in (2, 4, 8) if size <= COUNT] or [2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs 2 GPUs, there are {COUNT}"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_sums_by_reading_peers(on_ranks, tmp_path, size, dtype) -> None:
    ranks = on_ranks(size, PROGRAM, "sums", store=str(tmp_path / "store"), dtype=dtype)
    for found in ranks[1:]:
        for total, first in zip(found, ranks[0], strict=True):
            assert torch.equal(total, first)


@pytest.mark.parametrize("size", SIZES)
def test_graphs_hold_sums(on_ranks, tmp_path, size) -> None:
    first, *others = on_ranks(size, PROGRAM, "graphs", store=str(tmp_path / "store"))
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_hold_the_same_after_many_sums(on_ranks, tmp_path, size) -> None:
    first, *others = on_ranks(size, PROGRAM, "many", store=str(tmp_path / "store"))
    assert all(one.isfinite().all() for one in first)
    for found in others:
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, first, strict=True))


@pytest.mark.parametrize("rows", [1, 100])
def test_a_sum_that_nobody_joins_can_be_given_up(on_ranks, tmp_path, rows) -> None:
    """Short messages are waited for in another way than long ones; a later sum is not waited for at all."""
    assert on_ranks(2, PROGRAM, "give_up", store=str(tmp_path / "store"), rows=rows)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_sums_that_are_begun_and_ended(on_ranks, tmp_path, size, dtype) -> None:
    ranks = on_ranks(size, PROGRAM, "begun_sums", store=str(tmp_path / "store"), dtype=dtype)
    for found in ranks[1:]:
        for total, first in zip(found, ranks[0], strict=True):
            assert torch.equal(total, first)


def test_a_begun_sum_that_nobody_joins_can_be_given_up(on_ranks, tmp_path) -> None:
    assert on_ranks(2, PROGRAM, "give_up_begun", store=str(tmp_path / "store"))[0]
