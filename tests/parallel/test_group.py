"""`TensorParallelGroup` without other processes (`test_layers.py` has them)."""

import threading

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


def test_aborting_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's end waits for graphs that only go later; the peers are told all the same."""
    begun, may_end, ended = (threading.Event() for _ in range(3))

    class Nccl:
        def abort(self) -> None:
            begun.set()
            may_end.wait(30)
            ended.set()
            raise RuntimeError("timed out")

    class Peers:
        told = False

        def abort(self) -> None:
            self.told = True

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    peers = Peers()
    TensorParallelGroup(0, 2, Nccl(), peers).abort()
    assert peers.told and not ended.is_set()
    assert begun.wait(30)
    may_end.set()
    assert ended.wait(30)
