"""Sums over the ranks of what a layer computes in parts, with the residual and the norm that follow.

Owns who adds the residual, and by what a sum is made. Knows nothing of what the parts are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.peer_sums import Norm

ROW_STEP = 256
"""The first part is a multiple where there are so many rows: products are fastest then."""

Summand = Callable[[torch.Tensor | None], torch.Tensor]
"""Makes a rank's part of a sum, [T, width], and adds to it the tensor of that shape, if it is given one."""


class BegunSum(Protocol):
    """A sum over the ranks that is under way while the rank computes."""

    def end(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum of all parts and the residual, its norm). Sums end in the order in which they began."""


def two_parts(num_tokens: int) -> tuple[slice, slice]:
    """The rows of a step's two parts, of which the first is the larger one."""
    half = -(-num_tokens // 2)
    first = -(-half // ROW_STEP) * ROW_STEP if num_tokens >= 2 * ROW_STEP else half
    return slice(0, first), slice(first, num_tokens)


def sum_and_norm(
    group: TensorParallelGroup, part: Summand, residual: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual: [T, width], the same on all ranks. Returns (the sum of all parts and the residual, its norm).

    On a GPU the residual may be overwritten.
    """
    if group.reads_peers(*residual.shape, residual.dtype):
        return group.peers.sum_and_norm(part(None), residual, norm)
    y = group.all_reduce(part(_own(group, residual)))
    return y, norm(y)


def begin_sum(group: TensorParallelGroup, part: Summand, residual: torch.Tensor) -> BegunSum:
    """As `sum_and_norm`, but what is begun here is ended later. No more than two may be under way."""
    exchange = group.exchange
    if exchange is not None and exchange.takes(*residual.shape, residual.dtype):
        return exchange.begin(part(None), residual)
    y = part(_own(group, residual)).contiguous()
    return _QueuedSum(y, group.backend.allreduce([y]) if group.size > 1 else None)


@dataclass(frozen=True)
class _QueuedSum:
    """By the group's backend, on a stream or thread of its own."""

    y: torch.Tensor
    work: dist.Work | None

    def end(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        if self.work is not None:
            self.work.wait()
        return self.y, norm(self.y)


def _own(group: TensorParallelGroup, residual: torch.Tensor) -> torch.Tensor | None:
    """The residual is whole on every rank, so one rank alone adds it before the sum."""
    return residual if group.rank == 0 else None
