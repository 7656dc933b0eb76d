"""Sharing memory between ranks: threads in place of processes, and a driver whose memory is torch's."""

import ctypes
import enum
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybridserve.kernels.all_reduce import MAX_PROGRAMS, signal_bytes, slot_bytes
from hybridserve.parallel import peer_memory
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.peer_memory import CudaDriver, Unreachable
from hybridserve.parallel.peer_sums import (
    MAX_MESSAGE_BYTES,
    as_rows,
    low_latency_words,
    one_shot_bytes,
    open_peers,
)

CPU = torch.device("cpu")
HALF = 4096


class HostDriver:
    """Ordinary memory; the handle is the address itself."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.held: dict[int, torch.Tensor] = {}
        self.opened: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        self._fail("allocate")
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        self.held[block.data_ptr()] = block
        return block.data_ptr()

    def handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        self._fail("open")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def fill(self, address: int, value: int, num_bytes: int) -> None:
        for start, block in self.held.items():
            if start <= address < start + block.numel():
                block[address - start :][:num_bytes] = value

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(to, source, num_bytes)

    def write(self, address: int, number: int, stream: int) -> None:
        self._fail("write")
        ctypes.c_int32.from_address(address).value = number

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def free(self, address: int) -> None:
        del self.held[address]

    def _fail(self, what: str) -> None:
        if self.fails == what:
            raise Unreachable(f"{what} fails here")


def on_threads(drivers: list[HostDriver], each: Callable[[int], object] | None = None) -> list:
    """What `open_peers` returns on each rank."""
    store, size = dist.HashStore(), len(drivers)
    results: list = [None] * size

    def run(rank: int) -> None:
        results[rank] = open_peers(rank, size, store, CPU, driver=drivers[rank], half_bytes=HALF)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in results
    return results


def test_all_ranks_know_all_buffers() -> None:
    drivers = [HostDriver() for _ in range(3)]
    found = on_threads(drivers)
    own = [next(iter(driver.held)) for driver in drivers]
    for rank, (peers, reason) in enumerate(found):
        assert reason == ""
        memory = peers.memory
        assert (memory.rank, memory.world_size, memory.half_bytes) == (rank, 3, HALF)
        assert memory.buffers.tolist() == own
        # of so short a buffer the slots take all messages
        words = HALF // 4
        assert memory.slots.max_words == words and memory.slots.calls.tolist() == [0, 0]
        assert memory.slots.slots.tolist() == [address + 2 * HALF for address in own]
        signals = 2 * HALF + slot_bytes(3, words)
        assert memory.signals.tolist() == [address + signals for address in own]
        assert memory.calls.tolist() == [0] * MAX_PROGRAMS
        assert memory.given_up == own[rank] + signals + signal_bytes(3)
        assert drivers[rank].held[own[rank]].numel() == signals + signal_bytes(3) + 4


@pytest.mark.parametrize("what", ["allocate", "open"])
def test_one_rank_that_cannot_switches_it_off_everywhere(what: str) -> None:
    drivers = [HostDriver(), HostDriver(fails=what), HostDriver()]
    for peers, reason in on_threads(drivers):
        assert peers is None
        assert f"{what} fails here" in reason or "rank 1 shares no memory" in reason
    # nothing is kept
    assert all(not driver.held and not driver.opened for driver in drivers)


def test_another_host_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter([b"one".ljust(64), b"two".ljust(64)] * 4)
    local = threading.local()

    def host() -> bytes:
        if not hasattr(local, "name"):
            local.name = next(names)
        return local.name

    monkeypatch.setattr(peer_memory, "_host", host)
    for peers, reason in on_threads([HostDriver(), HostDriver()]):
        assert peers is None and "is on another host" in reason


def test_giving_up_is_a_word_of_the_own_memory() -> None:
    drivers = [HostDriver(), HostDriver()]
    found = on_threads(drivers)
    found[0][0].abort()
    block, other = (next(iter(driver.held.values())) for driver in drivers)
    assert block[-4:].all() and not block[:-4].any() and not other.any()


def test_what_is_closed_is_let_go_once_and_written_no_more() -> None:
    drivers = [HostDriver() for _ in range(3)]
    found = on_threads(drivers)
    group = TensorParallelGroup(0, 3, backend=object(), peers=found[0][0])
    blocks = [next(iter(driver.held.values())) for driver in drivers]
    group.close()
    assert not drivers[0].held and not drivers[0].opened
    # the others' own is theirs
    assert all(driver.held and len(driver.opened) == 2 for driver in drivers[1:])
    group.close()
    # a rank may be found to be gone after that
    group.abort()
    assert not any(block.any() for block in blocks)


def test_memory_that_cuda_keeps_does_not_keep_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    drivers = [HostDriver() for _ in range(3)]
    found = on_threads(drivers)
    close = drivers[1].close

    def close_one(address: int) -> None:
        if address == next(iter(drivers[0].held)):
            raise Unreachable("cudaIpcCloseMemHandle: cudaErrorInvalidDevice")
        close(address)

    drivers[1].close = close_one
    found[1][0].close()
    assert not drivers[1].held and len(drivers[1].opened) == 1
    assert "memory shared with rank 0 could not be let go: cudaIpcCloseMemHandle" in caplog.text


def test_messages_it_takes() -> None:
    peers = on_threads([HostDriver(), HostDriver()])[0][0]
    assert peers.takes(1, 1024, torch.float32) and not peers.takes(1, 1025, torch.float32)
    assert peers.takes(2, 1024, torch.bfloat16) and not peers.takes(0, 8, torch.bfloat16)
    assert not peers.takes(1, 8, torch.int64)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        # a hidden vector a row, whatever its width
        ((3, 5120), (3, 5120)),
        ((2, 4, 1024), (8, 1024)),
        # a number a head: 8,192 tokens of 32 heads are no 8,192 turns of 32 numbers
        ((8192, 32), (64, 4096)),
        ((4, 48), (3, 64)),
        # nothing longer divides them
        ((7, 48), (7, 48)),
        ((255, 32), (255, 32)),
        # of a prefill of any length, filled up
        ((257, 32), (3, 4096)),
        ((2049, 4), (3, 4096)),
        ((8191, 32), (64, 4096)),
        ((8191, 1025), (8191, 1025)),
        ((5, 1), (5, 1)),
    ],
)
def test_narrow_messages_are_summed_in_longer_rows(shape: tuple[int, ...], rows: tuple[int, int]) -> None:
    x = torch.rand(shape)
    found = as_rows(x)
    assert found.shape == rows
    assert (
        torch.equal(found.reshape(-1)[: x.numel()], x.view(-1)) and not found.reshape(-1)[x.numel() :].any()
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the interpreted kernel; test_gpus.py has compiled ones"
)
@pytest.mark.parametrize("shape", [(513, 32), (3, 1025), (5, 1)])
def test_a_sum_has_the_messages_own_shape(shape: tuple[int, int]) -> None:
    peers, _ = open_peers(0, 1, dist.HashStore(), CPU, driver=HostDriver(), half_bytes=2**17)
    x = torch.rand(shape)
    total = peers.all_reduce(x)
    assert total.shape == shape and torch.equal(total, x)


def test_more_ranks_write_shorter_messages_to_each_other() -> None:
    # 64 rows of 4,096 in bf16 between two
    words = {size: low_latency_words(size) for size in (2, 3, 4, 8)}
    assert words[2] * 4 == 64 * 4096 * 2
    for size, longest in words.items():
        assert 0 <= 2**20 - 2 * 4 * longest * (size - 1) < 32 * size and longest % 4 == 0


def test_what_the_slots_take() -> None:
    slots = on_threads([HostDriver(), HostDriver()])[0][0].memory.slots
    assert slots.takes(1, 1024, 4) and slots.takes(2, 1024, 2) and not slots.takes(1, 1025, 4)
    # two of these halves are a word, but not of two rows
    assert slots.takes(1024, 1, 2) and not slots.takes(1025, 1, 2)
    assert not slots.takes(1, 8, 1) and not slots.takes(0, 8, 4)


def test_more_ranks_read_less_each() -> None:
    limits = [one_shot_bytes(size) for size in (2, 3, 4, 8, 16)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == MAX_MESSAGE_BYTES and limits[-1] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_cuda_the_reason_is_given() -> None:
    peers, reason = open_peers(0, 1, dist.HashStore(), CPU)
    assert peers is None and reason.startswith("rank 0: ")


class Runtime:
    """As `cuda.bindings` answers, its `runtime` and its `driver`: an error and at most one value, of types of
    its own."""

    cudaIpcMemLazyEnablePeerAccess = cudaStreamNonBlocking = 1
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDefault="any")

    class cudaError_t(enum.IntEnum):  # noqa: N801
        cudaSuccess = 0
        cudaErrorInvalidDevice = 101

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_NOT_SUPPORTED = 801

    class CUstreamWriteValue_flags(enum.IntEnum):  # noqa: N801
        CU_STREAM_WRITE_VALUE_DEFAULT = 0

    class cudaIpcMemHandle_t:  # noqa: N801
        def __init__(self) -> None:
            self.content = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:  # noqa: N802
            return ctypes.addressof(self.content)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Callable[..., tuple]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        is_runtime = name.startswith("cuda")

        def call(*arguments: object) -> tuple:
            self.calls.append((name, *arguments))
            if name == self.fails:
                refused = self.cudaError_t.cudaErrorInvalidDevice
                return (refused if is_runtime else self.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)
            values = {"cudaMalloc": [2**40], "cudaStreamCreateWithFlags": [77]}
            if name == "cudaIpcGetMemHandle":
                handle = self.cudaIpcMemHandle_t()
                handle.content[:] = bytes(range(64))
                values[name] = [handle]
            if name == "cudaIpcOpenMemHandle":
                values[name] = [int.from_bytes(arguments[0].content.raw[:2], "big")]
            well = self.cudaError_t.cudaSuccess if is_runtime else self.CUresult.CUDA_SUCCESS
            return (well, *values.get(name, []))

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    package = types.ModuleType("cuda.bindings")
    package.runtime = package.driver = found
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return found


def test_cuda_is_asked_on_the_ranks_device(runtime: Runtime) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    address = driver.allocate(100)
    assert driver.handle(address) == bytes(range(64))
    assert driver.open(bytes(range(64))) == 1
    driver.fill(address, 1, 8)
    driver.copy(address, 7, 8, 3)
    driver.write(address, 5, 3)
    driver.close(1)
    driver.free(address)
    asked, told = runtime.calls[::2], runtime.calls[1::2]
    assert asked == [("cudaSetDevice", 1)] * len(told)
    # whole pages, zeroed before anybody is told of them
    assert told[1:4] == [
        ("cudaMalloc", 2 * 2**20),
        ("cudaMemsetAsync", 2**40, 0, 100, 77),
        ("cudaStreamSynchronize", 77),
    ]
    assert told[-5:] == [
        ("cudaMemsetAsync", 2**40, 1, 8, 77),
        ("cudaMemcpyAsync", 2**40, 7, 8, "any", 3),
        ("cuStreamWriteValue32", 3, 2**40, 5, 0),
        ("cudaIpcCloseMemHandle", 1),
        ("cudaFree", 2**40),
    ]


def test_what_cuda_refuses_is_named(runtime: Runtime) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    runtime.fails = "cudaIpcOpenMemHandle"
    with pytest.raises(Unreachable, match="cudaIpcOpenMemHandle: cudaErrorInvalidDevice"):
        driver.open(bytes(64))
    assert runtime.calls[-1] == ("cudaGetLastError",)
    runtime.fails = "cuStreamWriteValue32"
    with pytest.raises(Unreachable, match="cuStreamWriteValue32: CUDA_ERROR_NOT_SUPPORTED"):
        driver.write(2**40, 1, 0)
    runtime.fails = "cudaMemsetAsync"
    with pytest.raises(Unreachable, match="cudaMemsetAsync: cudaErrorInvalidDevice"):
        driver.allocate(100)
    assert runtime.calls[-1] == ("cudaFree", 2**40)
