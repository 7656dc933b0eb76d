"""Sums over the ranks by reading each other's memory, for messages too small for a ring.

Owns which message is summed how, and the layout of the memory that this takes; `peer_memory` shares it.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from hybridserve.kernels.all_reduce import GIVEN_UP, MAX_PROGRAMS, PeerMemory, signal_bytes
from hybridserve.parallel.peer_memory import CudaDriver, Driver, share
from hybridserve.parallel.rendezvous import Store

MAX_MESSAGE_BYTES = 8 * 2**20
"""Larger messages are NCCL's. On two H200 this is still faster at this size (docs/performance.md)."""
ONE_SHOT_BYTES = {2: MAX_MESSAGE_BYTES, 4: 512 * 2**10, 8: 256 * 2**10}
"""Ranks, at most -> the longest message that each rank reads whole from all others. Between two ranks the
second shot saves no bytes; for 4 and 8 these are estimates, not measured."""
MAX_WIDTH = 16384
"""A program holds a whole row."""
NARROW, USUAL_WIDTH = 1024, 4096
"""Rows of less than `NARROW` elements are summed as longer ones where they make up such, of `USUAL_WIDTH` at
most: a program waits for each of its rows."""


class Norm(Protocol):
    """An RMSNorm over the last dimension: x / rms(x) * weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PeerAllReduce:
    """Sums over the ranks for messages of up to MAX_MESSAGE_BYTES.

    Every rank makes the same calls in the same order. CUDA graphs can hold them.
    """

    def __init__(self, memory: PeerMemory, abort: Callable[[], None]) -> None:
        self.memory = memory
        self._abort = abort

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a message [rows, width] is for this."""
        fits = 0 < rows * width * dtype.itemsize <= self.memory.half_bytes
        return fits and width <= MAX_WIDTH and dtype.is_floating_point and dtype.itemsize <= 4

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width], one that `takes` takes. Returns the sum, in memory of its own."""
        from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce, two_shot_all_reduce

        flat = as_rows(x.contiguous())
        if flat.numel() * flat.element_size() <= one_shot_bytes(self.memory.world_size):
            total, _ = one_shot_all_reduce(self.memory, flat)
        else:
            total = two_shot_all_reduce(self.memory, flat)
        return total.view(x.shape)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: this rank's part [T, width]; residual: [T, width], the same on all ranks.

        Returns (the sum of all parts and the residual, its norm), from one launch where every rank reads
        the parts whole.
        """
        from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce, two_shot_all_reduce

        if x.numel() * x.element_size() <= one_shot_bytes(self.memory.world_size):
            return one_shot_all_reduce(self.memory, x, residual=residual, weight=norm.weight, eps=norm.eps)
        total = two_shot_all_reduce(self.memory, x, residual=residual)
        return total, norm(total)

    def abort(self) -> None:
        """End the waiting for a rank that is gone, now and from now on; what sums return means nothing any
        more. Callable from any thread."""
        self._abort()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """A contiguous message as the rows that programs take in turn."""
    width = x.shape[-1]
    return x.view(-1, max(width, math.gcd(x.numel(), USUAL_WIDTH)) if width < NARROW else width)


def one_shot_bytes(world_size: int) -> int:
    """The longest message that is summed in one shot by so many ranks."""
    return next((limit for ranks, limit in ONE_SHOT_BYTES.items() if world_size <= ranks), 0)


def open_peers(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    *,
    driver: Driver | None = None,
    check: Callable[[], None] = lambda: None,
    half_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[PeerAllReduce | None, str]:
    """Share memory with the other ranks, all of which call this on the same `store`.

    check: called while the others are waited for; may raise. Returns what sums, or None on all ranks, and
    why, when one of them cannot reach another.
    """
    # signals after both halves: one allocation, one handle
    num_bytes = 2 * half_bytes + signal_bytes(size)
    addresses, used, reason = share(rank, size, store, num_bytes, lambda: driver or CudaDriver(device), check)
    if used is None:
        return None, reason
    signals = [one + 2 * half_bytes for one in addresses]
    memory = PeerMemory(
        rank,
        size,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(signals, dtype=torch.int64, device=device),
        torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        half_bytes,
    )
    own_signals = signals[rank]
    return PeerAllReduce(memory, lambda: used.fill(own_signals, GIVEN_UP, signal_bytes(size))), ""
