"""Sharing memory between ranks: threads in place of processes, and a driver whose memory is torch's."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybridserve.kernels.all_reduce import GIVEN_UP, MAX_PROGRAMS, signal_bytes
from hybridserve.parallel import peer_memory
from hybridserve.parallel.peer_memory import MAX_MESSAGE_BYTES, Unreachable, one_shot_bytes, open_peers

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
        assert memory.signals.tolist() == [address + 2 * HALF for address in own]
        assert memory.calls.tolist() == [0] * MAX_PROGRAMS
        assert drivers[rank].held[own[rank]].numel() == 2 * HALF + signal_bytes(3)


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


def test_giving_up_overwrites_the_own_signals_alone() -> None:
    drivers = [HostDriver(), HostDriver()]
    found = on_threads(drivers)
    found[0][0].abort()
    block, other = (next(iter(driver.held.values())) for driver in drivers)
    assert (block[2 * HALF :] == GIVEN_UP).all() and not block[: 2 * HALF].any() and not other.any()


def test_messages_it_takes() -> None:
    peers = on_threads([HostDriver(), HostDriver()])[0][0]
    assert peers.takes(1, 1024, torch.float32) and not peers.takes(1, 1025, torch.float32)
    assert peers.takes(2, 1024, torch.bfloat16) and not peers.takes(0, 8, torch.bfloat16)
    assert not peers.takes(1, 8, torch.int64)


def test_more_ranks_read_less_each() -> None:
    limits = [one_shot_bytes(size) for size in (2, 3, 4, 8, 16)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == MAX_MESSAGE_BYTES and limits[-1] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_cuda_the_reason_is_given() -> None:
    peers, reason = open_peers(0, 1, dist.HashStore(), CPU)
    assert peers is None and reason.startswith("rank 0: ")
