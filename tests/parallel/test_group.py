"""`TensorParallelGroup` without other processes (`test_layers.py` has them)."""

import pytest
import torch
import torch.distributed as dist

from hybridserve.parallel.group import SINGLE, TensorParallelGroup, connect


def test_a_single_rank_leaves_tensors_alone() -> None:
    x = torch.arange(4.0)
    assert SINGLE.all_reduce(x) is x and SINGLE.all_gather(x) is x


def test_connecting_one_rank_needs_nobody() -> None:
    assert connect(0, 1, dist.HashStore()) == SINGLE


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_out_of_range(rank, size) -> None:
    with pytest.raises(ValueError, match=f"tp_rank {rank} and tp_size {size}"):
        TensorParallelGroup(rank, size)


def test_several_ranks_need_a_backend() -> None:
    with pytest.raises(ValueError, match="tp_size 2 needs a connected backend"):
        TensorParallelGroup(0, 2)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl, got 'mpi'"):
        connect(0, 2, dist.HashStore(), backend="mpi")
