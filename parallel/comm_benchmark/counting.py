"""A process group's backend that counts what is handed to it.

Owns the counts and nothing else: every call goes on to the backend, and a call that it does not know how to
count is refused instead of being passed on uncounted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hybridserve.parallel.comm_benchmark.formulas import wire_factor
from hybridserve.parallel.exchange import ExchangedSum, PeerExchange
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.peer_sums import Norm, PeerAllReduce


@dataclass(frozen=True)
class CountedCall:
    """One collective as this rank saw it."""

    collective: str
    num_bytes: int
    """Of the message, by nccl-tests' definition: see `formulas`."""
    label: str

    def wire_bytes(self, ranks: int) -> float:
        """What this rank has to send at least."""
        return self.num_bytes * wire_factor(self.collective, ranks)


class CountingBackend:
    """Stands in a `TensorParallelGroup` in its backend's place."""

    def __init__(self, backend: dist.Backend) -> None:
        self._backend = backend
        self.calls: list[CountedCall] = []
        self.label = ""
        """What the caller names the calls to come."""

    def allreduce(self, tensors: Sequence[torch.Tensor], *options: object) -> dist.Work:
        self.count("all_reduce", tensors)
        return self._backend.allreduce(tensors, *options)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], *options: object
    ) -> dist.Work:
        self.count("all_gather", [part for parts in outputs for part in parts])
        return self._backend.allgather(outputs, inputs, *options)

    def _allgather_base(self, output: torch.Tensor, x: torch.Tensor, *options: object) -> dist.Work:
        self.count("all_gather", [output])
        return self._backend._allgather_base(output, x, *options)

    def _reduce_scatter_base(self, output: torch.Tensor, x: torch.Tensor, *options: object) -> dist.Work:
        self.count("reduce_scatter", [x])
        return self._backend._reduce_scatter_base(output, x, *options)

    def count(self, collective: str, tensors: Sequence[torch.Tensor]) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.calls.append(CountedCall(collective, num_bytes, self.label))


class CountingPeers:
    """Stands in a group in the place of what sums by reading peers' memory: an all-reduce all the same."""

    def __init__(self, peers: PeerAllReduce, counter: CountingBackend) -> None:
        self._peers = peers
        self._counter = counter
        self.takes = peers.takes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._counter.count("all_reduce", [x])
        return self._peers.all_reduce(x)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._counter.count("all_reduce", [x])
        return self._peers.sum_and_norm(x, residual, norm)


class CountingExchange:
    """Stands in a group in the place of what sums while the rank computes: an all-reduce, too."""

    def __init__(self, exchange: PeerExchange, counter: CountingBackend) -> None:
        self._exchange = exchange
        self._counter = counter
        self.takes = exchange.takes

    def begin(self, x: torch.Tensor, residual: torch.Tensor) -> ExchangedSum:
        self._counter.count("all_reduce", [x])
        return self._exchange.begin(x, residual)


def counted(group: TensorParallelGroup) -> tuple[TensorParallelGroup, CountingBackend]:
    """`group` with its calls counted from now on, and who counts them; a group of one rank makes none."""
    counter = CountingBackend(group.backend)
    if group.size == 1:
        return group, counter
    peers = None if group.peers is None else CountingPeers(group.peers, counter)
    exchange = None if group.exchange is None else CountingExchange(group.exchange, counter)
    return replace(group, backend=counter, peers=peers, exchange=exchange), counter
