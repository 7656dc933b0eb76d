"""The ranks of one replica, and the collectives between them.

Owns the process group object that layers are given. Knows nothing of layers, of models or of who starts
the processes: the caller hands over a `Store` on which the ranks meet, so that no address is fixed here.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class TensorParallelGroup:
    """One shard's place in its replica. With `size` 1 every collective returns its argument."""

    rank: int
    size: int
    backend: dist.Backend | None = None
    """The connected backend; None only with `size` 1."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"tp_rank must be in [0, tp_size), got tp_rank {self.rank} and tp_size {self.size}"
            )
        if self.size > 1 and self.backend is None:
            raise ValueError(f"tp_size {self.size} needs a connected backend")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place where it is contiguous; returns the sum."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self.backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Join the ranks' equally shaped `x` along `dim`, in the order of the ranks."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim)

    def abort(self) -> None:
        """End collectives that wait for a rank that is gone; callable from any thread. They raise, or return
        what means nothing, and the group cannot be used any more."""
        # gloo's end by themselves when a connection breaks
        if dist.is_nccl_available() and isinstance(self.backend, dist.ProcessGroupNCCL):
            self.backend.abort()


SINGLE = TensorParallelGroup(rank=0, size=1)


def connect(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    address: str | None = None,
) -> TensorParallelGroup:
    """Meet the other ranks on `store` and return this rank's group.

    The group is not registered as torch's default one: two replicas' groups can live in one process. gloo
    listens on `address`, by default on what the host's name resolves to.

    Raises:
        ValueError: `backend` is neither gloo nor nccl, or `rank` is not in [0, size).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if size == 1:
        return TensorParallelGroup(rank, size)
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        if address is None:
            gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
        else:
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return TensorParallelGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, gloo))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return TensorParallelGroup(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
