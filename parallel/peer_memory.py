"""Memory of every rank's GPU that all ranks of a replica can reach.

Owns how it is shared: each rank allocates some, and maps what the others have by CUDA's handles for other
processes, which needs one host and peers that reach each other. NVLink's multicast is not used. Knows nothing
of what the memory is for.
"""

import ctypes
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridserve.parallel.rendezvous import Store, wait_for_keys

logger = logging.getLogger(__name__)

_EXCHANGE_S = 60.0
_PAGE_BYTES = 2 * 2**20
"""CUDA shares whole pages of this size with other processes: what is shared takes whole ones."""
_HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Unreachable(Exception):
    """The ranks cannot read each other's memory; says why."""


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

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy in a stream, given as CUDA's handle; from or to another process' memory, too."""

    def write(self, address: int, number: int, stream: int) -> None:
        """Queue the writing of a number of 32 bits, into another process' memory, too: who sees it there sees
        all that the stream wrote before."""

    def close(self, address: int) -> None:
        """Unmap another process' memory."""

    def free(self, address: int) -> None: ...


class SharedMemory:
    """What `share` gave a rank, until it is closed; callable from any thread."""

    def __init__(self, rank: int, addresses: list[int], driver: Driver, num_bytes: int) -> None:
        """num_bytes: of each rank's."""
        self.num_bytes = num_bytes
        self._rank = rank
        self._addresses = addresses
        self._driver = driver
        self._lock = threading.Lock()

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        """As the driver's; nothing once it is closed."""
        with self._lock:
            if self._addresses:
                self._driver.fill(address, value, num_bytes)

    def close(self) -> None:
        """Unmap the others' memory and free this rank's own; see `TensorParallelGroup.close` for when."""
        with self._lock:
            addresses, self._addresses = self._addresses, []
            for peer, address in enumerate(addresses):
                let_go = self._driver.free if peer == self._rank else self._driver.close
                try:
                    let_go(address)
                except (Unreachable, RuntimeError) as error:
                    # the process goes on with less memory
                    logger.warning("memory shared with rank %d could not be let go: %s", peer, error)


def share(
    rank: int,
    size: int,
    store: Store,
    num_bytes: int,
    driver: Callable[[], Driver],
    check: Callable[[], None] = lambda: None,
    attempt: Callable[[Driver, int], None] = lambda driver, address: None,
) -> tuple[list[int], Driver | None, str]:
    """Share `num_bytes` of zeroed memory with the other ranks, all of which call this on the same `store`.

    driver: makes one, or raises Unreachable. check: called while the others are waited for; may raise.
    attempt: does to this rank's memory what else will be asked of the driver, or raises Unreachable.
    Returns (where each rank's memory lies, as this rank reaches it, the driver that mapped it, ""); on all
    ranks ([], None, why) when one of them cannot reach another.
    """
    made: Driver | None = None
    opened: list[int] = []
    address = None
    try:
        made = driver()
        address = made.allocate(num_bytes)
        attempt(made, address)
        own, reason = _host() + made.handle(address), ""
    except (Unreachable, RuntimeError) as error:
        own, reason = b"", f"rank {rank}: {error}"
    everyone = tell_all(store, "handle", rank, size, own, check)
    addresses = []
    if not reason:
        try:
            for peer, theirs in enumerate(everyone):
                addresses.append(address if peer == rank else _open(made, peer, theirs))
                opened += addresses[-1:] if peer != rank else []
        except (Unreachable, RuntimeError) as error:
            reason = f"rank {rank}: {error}"
    reasons = tell_all(store, "reason", rank, size, reason.encode(), check)
    found = [one.decode() for one in reasons if one]
    if not found:
        return addresses, made, ""
    if made is not None:
        for one in opened:
            made.close(one)
        if address is not None:
            made.free(address)
    return [], None, found[0]


def _open(driver: Driver, peer: int, theirs: bytes) -> int:
    here = _host()
    if not theirs:
        raise Unreachable(f"rank {peer} shares no memory")
    if not theirs.startswith(here):
        raise Unreachable(f"rank {peer} is on another host")
    return driver.open(theirs.removeprefix(here))


def tell_all(
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
    """CUDA's runtime and driver, by NVIDIA's bindings that torch's CUDA builds bring along."""

    def __init__(self, device: torch.device) -> None:
        """Raises Unreachable where the bindings are missing."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise Unreachable(f"the package cuda-bindings cannot be imported: {error}") from None
        self._cuda = runtime
        self._driver = driver
        self._index = torch.device(device).index or 0
        # made now: once it is needed, the device may be full of kernels that wait
        self._stream = int(self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))

    def allocate(self, num_bytes: int) -> int:
        address = int(self._call("cudaMalloc", -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES))
        try:
            self.fill(address, 0, num_bytes)
            self._call("cudaStreamSynchronize", self._stream)
        except Unreachable:
            self.free(address)
            raise
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

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", to, source, num_bytes, kind, stream)

    def write(self, address: int, number: int, stream: int) -> None:
        # behind a fence as of __threadfence_system(), but of the stream (CUDA's driver API, "Stream Memory
        # Operations"), which a queued copy of 4 bytes would not have
        default = self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._call("cuStreamWriteValue32", stream, address, number, int(default))

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Raises Unreachable naming the function and CUDA's error."""
        # the current device is a thread's own
        for function, given in (("cudaSetDevice", (self._index,)), (name, arguments)):
            is_runtime = function.startswith("cuda")
            library = self._cuda if is_runtime else self._driver
            well = self._cuda.cudaError_t.cudaSuccess if is_runtime else self._driver.CUresult.CUDA_SUCCESS
            try:
                error, *values = getattr(library, function)(*given)
            except (AttributeError, TypeError, ValueError) as other:
                raise Unreachable(f"{function} of cuda-bindings: {other}") from None
            if error != well:
                # it would be reported to who asks next
                self._cuda.cudaGetLastError()
                raise Unreachable(f"{function}: {error.name}")
        return values[0] if values else None
