"""Memory of every rank's GPU that all ranks of a replica can read, and the sums made by reading it.

Owns how the memory is shared: each rank allocates some, and maps what the others have by CUDA's handles for
other processes, which needs one host and peers that reach each other. NVLink's multicast is not used. Knows
nothing of what is summed.
"""

import ctypes
import logging
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridserve.kernels.all_reduce import GIVEN_UP, MAX_PROGRAMS, PeerMemory, signal_bytes
from hybridserve.parallel.rendezvous import Store, wait_for_keys

logger = logging.getLogger(__name__)

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
_EXCHANGE_S = 60.0
_PAGE_BYTES = 2 * 2**20
"""CUDA shares whole pages of this size with other processes: what is shared takes whole ones."""
_HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Unreachable(Exception):
    """The ranks cannot read each other's memory; says why."""


class Norm(Protocol):
    """An RMSNorm over the last dimension: x / rms(x) * weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Driver(Protocol):
    """What is asked of CUDA; addresses are integers."""

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory."""

    def handle(self, address: int) -> bytes:
        """By which another process can map the memory."""

    def open(self, handle: bytes) -> int:
        """The address here of another process' memory. Raises Unreachable."""

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        """Write bytes at once, whatever runs on the device."""

    def close(self, address: int) -> None:
        """Unmap another process' memory."""

    def free(self, address: int) -> None: ...


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
    opened: list[int] = []
    address = None
    try:
        driver = driver or CudaDriver(device)
        # signals after both halves: one allocation, one handle
        address = driver.allocate(2 * half_bytes + signal_bytes(size))
        own, reason = _host() + driver.handle(address), ""
    except (Unreachable, RuntimeError) as error:
        own, reason = b"", f"rank {rank}: {error}"
    everyone = _exchange(store, "handle", rank, size, own, check)
    addresses = []
    if not reason:
        try:
            for peer, theirs in enumerate(everyone):
                addresses.append(address if peer == rank else _open(driver, peer, theirs))
                opened += addresses[-1:] if peer != rank else []
        except (Unreachable, RuntimeError) as error:
            reason = f"rank {rank}: {error}"
    reasons = _exchange(store, "reason", rank, size, reason.encode(), check)
    found = [one.decode() for one in reasons if one]
    if found:
        if driver is not None:
            for one in opened:
                driver.close(one)
            if address is not None:
                driver.free(address)
        return None, found[0]
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
    return PeerAllReduce(memory, lambda: driver.fill(own_signals, GIVEN_UP, signal_bytes(size))), ""


def _open(driver: Driver, peer: int, theirs: bytes) -> int:
    here = _host()
    if not theirs:
        raise Unreachable(f"rank {peer} shares no memory")
    if not theirs.startswith(here):
        raise Unreachable(f"rank {peer} is on another host")
    return driver.open(theirs.removeprefix(here))


def _exchange(
    store: Store, what: str, rank: int, size: int, own: bytes, check: Callable[[], None]
) -> list[bytes]:
    """Every rank's value."""
    keys = [f"peers/{what}/{one}" for one in range(size)]
    # a store cannot hold an empty value on every backend
    store.set(keys[rank], b"." + own)
    return [value[1:] for value in wait_for_keys(store, keys, check, _EXCHANGE_S)]


def _host() -> bytes:
    """What names this machine, since it was started; 64 bytes."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    return boot.encode()[:64].ljust(64)


class CudaDriver:
    """CUDA's runtime, by NVIDIA's bindings that torch's CUDA builds bring along."""

    def __init__(self, device: torch.device) -> None:
        """Raises Unreachable where the bindings are missing."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise Unreachable(f"the package cuda-bindings cannot be imported: {error}") from None
        self._cuda = runtime
        self._index = torch.device(device).index or 0
        # made now: once it is needed, the device may be full of kernels that wait
        self._stream = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)

    def allocate(self, num_bytes: int) -> int:
        address = int(self._call("cudaMalloc", -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES))
        self.fill(address, 0, num_bytes)
        self._call("cudaStreamSynchronize", self._stream)
        return address

    def handle(self, address: int) -> bytes:
        one = self._call("cudaIpcGetMemHandle", address)
        # by where it lies: how its bytes are named differs between versions of the bindings
        return ctypes.string_at(one.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        one = self._cuda.cudaIpcMemHandle_t()
        ctypes.memmove(one.getPtr(), handle, _HANDLE_BYTES)
        return int(self._call("cudaIpcOpenMemHandle", one, self._cuda.cudaIpcMemLazyEnablePeerAccess))

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", address, value, num_bytes, self._stream)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Raises Unreachable naming the function and CUDA's error."""
        # the current device is a thread's own
        for function, given in (("cudaSetDevice", (self._index,)), (name, arguments)):
            try:
                error, *values = getattr(self._cuda, function)(*given)
            except (AttributeError, TypeError, ValueError) as other:
                raise Unreachable(f"{function} of cuda-bindings: {other}") from None
            if error != self._cuda.cudaError_t.cudaSuccess:
                # it would be reported to who asks next
                self._cuda.cudaGetLastError()
                raise Unreachable(f"{function}: {error.name}")
        return values[0] if values else None
