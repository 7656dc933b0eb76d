"""Sums of long messages that are begun, and ended when they are needed: meanwhile the rank computes.

The ranks' copy engines bring each rank's part to the others; no multiprocessor takes part, so products that
run meanwhile lose next to nothing (a ring's kernels would take multiprocessors from them, and wait for some).
Owns the order of copies and what is known when. The kernel that adds the parts up waits for them.

Each rank sends its whole part to every other: as many bytes as a ring's between two ranks, more beyond.

A part may be overwritten once its receiver has added it up, of which nobody is told: it follows. At most
`SLOTS / 2` sums of a rank are under way, so it begins sum k only after it has queued the end of sum k - 2 in
the same stream. That the peer's part k + 2 is here says that the peer has come to its beginning of sum k + 2,
and so has done its end of sum k. Sum k + 4, which takes the place of sum k, begins after this rank's end of
sum k + 2.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.kernels.all_reduce.exchange import (
    SLOTS,
    ExchangeMemory,
    exchange_bytes,
    flag_offset,
    slot_offset,
)
from hybridserve.parallel.peer_memory import CudaDriver, Driver, SharedMemory, share
from hybridserve.parallel.peer_sums import MAX_WIDTH, Norm
from hybridserve.parallel.rendezvous import Store

MAX_RANKS = 2
"""Beyond, a ring sends fewer bytes."""
_NUMBERS = 1 << 30
"""Calls' numbers come round after so many, a multiple of `SLOTS`."""


@dataclass(frozen=True)
class ExchangedSum:
    """One that is under way."""

    exchange: "PeerExchange"
    call: int
    x: torch.Tensor
    residual: torch.Tensor
    sent: "torch.cuda.Event | None"

    def end(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum of all parts and the residual, its norm), as soon as the parts are here."""
        return self.exchange.end(self, norm)


class PeerExchange:
    """Sums over the ranks for messages of up to `piece_bytes`, begun and ended.

    Every rank makes the same calls in the same order, and ends sums in the order in which it began them.
    """

    def __init__(
        self, memory: ExchangeMemory, addresses: list[int], driver: Driver, lane: "torch.cuda.Stream | None"
    ) -> None:
        """addresses: of each rank's memory, as this rank reaches it. lane: for copies; None without CUDA."""
        self.memory = memory
        self._addresses = addresses
        self._driver = driver
        num_bytes = exchange_bytes(memory.world_size, memory.piece_bytes)
        self._shared = SharedMemory(memory.rank, addresses, driver, num_bytes)
        self._calls = 0
        self._under_way: deque[int] = deque()
        self._lane = lane

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a message [rows, width] is for this."""
        fits = 0 < rows * width * dtype.itemsize <= self.memory.piece_bytes
        return fits and width <= MAX_WIDTH and dtype.is_floating_point and dtype.itemsize <= 4

    def begin(self, x: torch.Tensor, residual: torch.Tensor) -> ExchangedSum:
        """x: this rank's part [T, width], contiguous, one that `takes` takes. residual: [T, width], the same
        on all ranks. Neither may change before the end.

        Raises:
            ValueError: `takes` does not take it.
        """
        assert len(self._under_way) < SLOTS // 2, "too many sums are under way"
        assert x.is_contiguous(), x.stride()
        assert not (x.is_cuda and torch.cuda.is_current_stream_capturing()), "a graph cannot hold such a sum"
        if not self.takes(*x.shape, x.dtype):
            raise ValueError(
                f"a message of {x.shape[0]} x {x.shape[1]} {x.dtype}, {x.numel() * x.element_size()} bytes, "
                f"is none of at most {self.memory.piece_bytes} bytes in rows of at most {MAX_WIDTH} floats"
            )
        self._calls += 1
        call, memory = self._calls, self.memory
        self._under_way.append(call)
        sent = None
        if self._lane is not None:
            self._lane.wait_stream(torch.cuda.current_stream(x.device))
        for peer, address in enumerate(self._addresses):
            if peer != memory.rank:
                self._send(call, x, peer, address)
        if self._lane is not None:
            sent = torch.cuda.Event()
            sent.record(self._lane)
        return ExchangedSum(self, call, x, residual, sent)

    def end(self, begun: ExchangedSum, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExchangedSum.end`."""
        from hybridserve.kernels.all_reduce.triton_exchange import sum_parts

        first = self._under_way.popleft()
        assert begun.call == first, f"sum {begun.call} is ended before {first}, which was begun earlier"
        x = begun.x
        both = sum_parts(self.memory, self._number(begun.call), x, begun.residual, norm.weight, norm.eps)
        if begun.sent is not None:
            # what is let go of from here on is no longer read by the copies; behind the sum, which would
            # begin later for it
            torch.cuda.current_stream(x.device).wait_event(begun.sent)
        return both

    def abort(self) -> None:
        """End the waiting for a rank that is gone, now and from now on; what sums return means nothing any
        more. Callable from any thread."""
        rank, size, piece_bytes = self.memory.rank, self.memory.world_size, self.memory.piece_bytes
        self._shared.fill(self._addresses[rank] + flag_offset(SLOTS, 0, size, piece_bytes), 1, 4)

    @property
    def shared_bytes(self) -> int:
        """Of this rank."""
        return self._shared.num_bytes

    def close(self) -> None:
        """Let go of the memory; see `TensorParallelGroup.close`."""
        self._shared.close()

    def _send(self, call: int, x: torch.Tensor, peer: int, address: int) -> None:
        rank, size, piece_bytes = self.memory.rank, self.memory.world_size, self.memory.piece_bytes
        slot = self._number(call) % SLOTS
        lane = _handle(self._lane)
        place = address + slot_offset(slot, rank, peer, size, piece_bytes)
        self._driver.copy(place, x.data_ptr(), x.numel() * x.element_size(), lane)
        self._driver.write(address + flag_offset(slot, rank, size, piece_bytes), self._number(call), lane)

    @staticmethod
    def _number(call: int) -> int:
        return call % _NUMBERS


def _handle(stream: "torch.cuda.Stream | None") -> int:
    return 0 if stream is None else stream.cuda_stream


def open_exchange(
    rank: int,
    size: int,
    store: Store,
    device: torch.device,
    piece_bytes: int,
    *,
    driver: Driver | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[PeerExchange | None, str]:
    """Share memory with the other ranks, all of which call this on the same `store`.

    piece_bytes: of the longest message. check: called while the others are waited for; may raise. Returns
    what sums, or None on all ranks, and why: one of them cannot reach another, or there are too many.
    """
    if size > MAX_RANKS:
        return None, f"between {size} ranks a ring sends fewer bytes"
    piece_bytes = -(-piece_bytes // 16) * 16
    num_bytes = exchange_bytes(size, piece_bytes)
    lane = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attempt(driver: Driver, address: int) -> None:
        # refused now rather than in a step
        driver.write(address + flag_offset(0, 0, size, piece_bytes), 0, _handle(lane))

    addresses, used, reason = share(
        rank, size, store, num_bytes, lambda: driver or CudaDriver(device), check, attempt
    )
    if used is None:
        return None, reason
    start = addresses[rank]
    parts, flags, end = start, *(start + flag_offset(slot, 0, size, piece_bytes) for slot in (0, SLOTS))
    own = torch.tensor([parts, flags, end], dtype=torch.int64, device=device)
    return PeerExchange(ExchangeMemory(rank, size, own, piece_bytes), addresses, used, lane), ""
