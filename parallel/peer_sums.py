"""Sums over the ranks by reading each other's memory, for messages too small for a ring.

Owns which message is summed how, and the layout of the memory that this takes; `peer_memory` shares it.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from hybridserve.kernels.all_reduce import (
    MAX_PROGRAMS,
    WORD_BYTES,
    PeerMemory,
    Slots,
    signal_bytes,
    slot_bytes,
)
from hybridserve.kernels.hopper import has_dependent_launches
from hybridserve.parallel.peer_memory import CudaDriver, Driver, SharedMemory, share, tell_all
from hybridserve.parallel.rendezvous import Store

MAX_MESSAGE_BYTES = 8 * 2**20
"""Larger messages are NCCL's. On two H200 this is still faster at this size (docs/performance.md)."""
ONE_SHOT_BYTES = {2: MAX_MESSAGE_BYTES, 4: 512 * 2**10, 8: 256 * 2**10}
"""Ranks, at most -> the longest message that each rank reads whole from all others. Between two ranks the
second shot saves no bytes; for 4 and 8 these are estimates, not measured."""
LOW_LATENCY_SENT = 2**20
"""What a rank sends in all, at most, for a message to be written into the others' memory with numbers. Two
H200 gain from it up to here; more ranks were not measured."""
MAX_WIDTH = 16384
"""A program holds a whole row."""
NARROW, USUAL_WIDTH = 1024, 4096
"""Rows of less than `NARROW` elements are summed as longer ones where they make up such, of `USUAL_WIDTH` at
most: a program waits for each of its rows."""
_PADDED = 2 * USUAL_WIDTH
"""From so many elements on, narrow rows are filled up to whole ones of `USUAL_WIDTH`. Steps outside of graphs
have any number of tokens, and no kernel is to be compiled for one of them."""
_GIVEN_UP_BYTES = 4


class Norm(Protocol):
    """An RMSNorm over the last dimension: x / rms(x) * weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PeerAllReduce:
    """Sums over the ranks for messages of up to MAX_MESSAGE_BYTES.

    Every rank makes the same calls in the same order. CUDA graphs can hold them.
    """

    def __init__(self, memory: PeerMemory, shared: SharedMemory) -> None:
        self.memory = memory
        self.dependent = has_dependent_launches(memory.buffers.device)
        """Whether sums are launched before the kernel ahead of them has ended."""
        self._shared = shared

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a message [rows, width] is for this."""
        fits = 0 < rows * width * dtype.itemsize <= self.memory.half_bytes
        return fits and width <= MAX_WIDTH and dtype.is_floating_point and dtype.itemsize <= 4

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width], one that `takes` takes. Returns the sum, in memory of its own."""
        from hybridserve.kernels.all_reduce.triton_peers import two_shot_all_reduce

        flat = as_rows(x.contiguous())
        whole = self._in_one_step(flat)
        if whole is not None:
            total, _ = whole(self.memory, flat, dependent=self.dependent)
        else:
            total = two_shot_all_reduce(self.memory, flat, dependent=self.dependent)
        return total.view(-1)[: x.numel()].view(x.shape)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: this rank's part [T, width]; residual: [T, width], the same on all ranks.

        Returns (the sum of all parts and the residual, its norm), from one launch where every rank has
        the parts whole.
        """
        from hybridserve.kernels.all_reduce.triton_peers import two_shot_all_reduce

        whole = self._in_one_step(x)
        how = {"residual": residual, "dependent": self.dependent}
        if whole is not None:
            return whole(self.memory, x, weight=norm.weight, eps=norm.eps, **how)
        total = two_shot_all_reduce(self.memory, x, **how)
        return total, norm(total)

    def _in_one_step(self, x: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
        """What sums [T, width] from whole parts of all ranks; None where the bytes are too many for that."""
        from hybridserve.kernels.all_reduce.triton_low_latency import low_latency_all_reduce
        from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce

        if self.memory.slots.takes(*x.shape, x.element_size()):
            return low_latency_all_reduce
        fits = x.numel() * x.element_size() <= one_shot_bytes(self.memory.world_size)
        return one_shot_all_reduce if fits else None

    def abort(self) -> None:
        """End the waiting for a rank that is gone, now and from now on; what sums return means nothing any
        more. Callable from any thread."""
        self._shared.fill(self.memory.given_up, 1, _GIVEN_UP_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Of this rank."""
        return self._shared.num_bytes

    def close(self) -> None:
        """Let go of the memory; see `TensorParallelGroup.close`."""
        self._shared.close()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """A contiguous message as the rows that programs take in turn; zeros fill up the last."""
    width, size = x.shape[-1], x.numel()
    if width >= NARROW:
        return x.view(-1, width)
    if size >= _PADDED and size % USUAL_WIDTH:
        return torch.nn.functional.pad(x.view(-1), (0, -size % USUAL_WIDTH)).view(-1, USUAL_WIDTH)
    return x.view(-1, max(width, math.gcd(size, USUAL_WIDTH)))


def one_shot_bytes(world_size: int) -> int:
    """The longest message that is summed in one shot by so many ranks."""
    return next((limit for ranks, limit in ONE_SHOT_BYTES.items() if world_size <= ranks), 0)


def low_latency_words(world_size: int) -> int:
    """Words of the longest message that is written into the others' memory."""
    others = max(1, world_size - 1)
    # a word is sent as twice its bytes; slots begin at multiples of 16 bytes
    return LOW_LATENCY_SENT // (2 * others) // WORD_BYTES // 4 * 4


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
    # one allocation, one handle: both halves of the buffer, slots, signals, whether waiting is given up
    max_words = min(low_latency_words(size), half_bytes // WORD_BYTES // 4 * 4)
    slots_at = 2 * half_bytes
    signals_at = slots_at + slot_bytes(size, max_words)
    given_up_at = signals_at + signal_bytes(size)
    num_bytes = given_up_at + _GIVEN_UP_BYTES
    addresses, used, reason = share(rank, size, store, num_bytes, lambda: driver or CudaDriver(device), check)
    if used is None:
        return None, reason

    def table(offset: int) -> torch.Tensor:
        return torch.tensor([one + offset for one in addresses], dtype=torch.int64, device=device)

    # programs of the same number wait for each other, so all ranks have as many
    programs = tell_all(store, "programs", rank, size, str(_programs(device)).encode(), check)
    given_up = addresses[rank] + given_up_at
    memory = PeerMemory(
        rank,
        size,
        table(0),
        table(signals_at),
        torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        half_bytes,
        given_up,
        Slots(table(slots_at), torch.zeros(2, dtype=torch.int32, device=device), max_words),
        min(map(int, programs)),
    )
    return PeerAllReduce(memory, SharedMemory(rank, addresses, used, num_bytes)), ""


def _programs(device: torch.device) -> int:
    """So many that one fits a multiprocessor each."""
    if device.type != "cuda":
        return MAX_PROGRAMS
    return min(MAX_PROGRAMS, torch.cuda.get_device_properties(device).multi_processor_count)
