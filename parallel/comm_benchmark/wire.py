"""What a strategy sends through: the group, counted and with each message named, or nothing at all."""

from typing import Protocol

import torch

from hybridserve.parallel.comm_benchmark.counting import CountingBackend, counted
from hybridserve.parallel.group import SINGLE, TensorParallelGroup
from hybridserve.parallel.layers.sums import BegunSum, Summand, begin_sum, sum_and_norm
from hybridserve.parallel.peer_sums import Norm


class Wire(Protocol):
    """The collectives that the strategies need."""

    def all_reduce(self, x: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of the ranks' dense `x`, in place."""
        ...

    def sum_and_norm(
        self, part: Summand, residual: torch.Tensor, norm: Norm, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `layers.sums`."""
        ...

    def begin_sum(self, part: Summand, residual: torch.Tensor, label: str) -> BegunSum: ...

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, label: str) -> None:
        """Every rank's dense `x`, one after another, into `out`."""
        ...


class GroupWire:
    """Through a group, counted."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.counter: CountingBackend
        self.group, self.counter = counted(group)

    def all_reduce(self, x: torch.Tensor, label: str) -> torch.Tensor:
        self.counter.label = label
        return self.group.all_reduce(x)

    def sum_and_norm(
        self, part: Summand, residual: torch.Tensor, norm: Norm, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.counter.label = label
        return sum_and_norm(self.group, part, residual, norm)

    def begin_sum(self, part: Summand, residual: torch.Tensor, label: str) -> BegunSum:
        self.counter.label = label
        return begin_sum(self.group, part, residual)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, label: str) -> None:
        if self.group.size == 1:
            out.view(-1).copy_(x.reshape(-1))
            return
        self.counter.label = label
        # flat on both sides: backends disagree on the shapes of anything else
        self.group.backend._allgather_base(out.view(-1), x.contiguous().view(-1)).wait()


class NoWire:
    """Sends nothing: sums stay this rank's own, and `out` keeps what an earlier step gathered."""

    def all_reduce(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return x

    def sum_and_norm(
        self, part: Summand, residual: torch.Tensor, norm: Norm, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_and_norm(SINGLE, part, residual, norm)

    def begin_sum(self, part: Summand, residual: torch.Tensor, label: str) -> BegunSum:
        return begin_sum(SINGLE, part, residual)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, label: str) -> None:
        pass
