"""Opening channels: which kind, and that replicas on one host do not meet. Ranks are threads here."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridserve.parallel.rendezvous import LOOPBACK, poll_until
from hybridserve.parallel.step_channel import opening
from hybridserve.parallel.step_channel.board import RankState, agree_on_least
from hybridserve.parallel.step_channel.channel import FIRST_BYTES, GroupChannel, MemoryChannel, StepChannel
from hybridserve.parallel.step_channel.memory import SharedMemory, host_identity


def on_threads(size: int, work: Callable[[int], object]) -> list:
    """What `work` returns or raises for each rank."""
    found: list = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture
def opened() -> Iterator[Callable[[int], list[StepChannel]]]:
    """`opened(size)`: the ends of a new channel, by rank."""
    channels: list[StepChannel] = []

    def make(size: int) -> list[StepChannel]:
        store = dist.HashStore()
        new = on_threads(size, lambda rank: opening.open_channel(store, rank, size, address=LOOPBACK))
        channels.extend(new)
        return new

    yield make
    for channel in channels:
        channel.close()


@pytest.fixture(params=["memory", "group"])
def kind(request, monkeypatch) -> type:
    if request.param == "group":
        monkeypatch.setattr(opening, "host_identity", lambda: "")
    return {"memory": MemoryChannel, "group": GroupChannel}[request.param]


def test_messages_reach_all(opened, kind) -> None:
    channels = opened(3)
    assert all(isinstance(channel, kind) for channel in channels)
    for message in (b"a", bytes(range(256)) * 300, b"c" * (FIRST_BYTES - 8), b"d" * (FIRST_BYTES - 7)):
        channels[0].send(message)
        assert [channel.receive(10.0) for channel in channels[1:]] == [message] * 2
    assert channels[1].receive(0.01) is None


def test_rows_are_seen_by_all(opened, kind) -> None:
    channels = opened(2)
    mine = channels[1].board
    mine.report(RankState.SIZED, 7, 2**32 - 1)
    mine.report(RankState.READY)
    mine.count(2**32 + 5, 4)
    mine.beat()
    row = channels[0].board.row(1)
    assert (row.beats, row.state, row.value, row.tag) == (1, RankState.READY, 7, 2**32 - 1)
    assert (row.taken, row.done) == (5, 4)
    assert channels[1].board.row(0).state == RankState.ABSENT


def test_the_least_is_agreed_on(opened, kind) -> None:
    channels = opened(3)

    def agree(rank: int) -> int:
        wait = lambda done: poll_until(done, lambda: None, 10.0)  # noqa: E731
        return agree_on_least(channels[rank].board, 30 + 10 * ((rank + 1) % 3), 9, wait)

    assert on_threads(3, agree) == [30, 30, 30]


def test_another_layout_is_refused(opened) -> None:
    channels = opened(2)
    wait = lambda done: poll_until(done, lambda: None, 0.2)  # noqa: E731
    found = on_threads(2, lambda rank: agree_on_least(channels[rank].board, 5, rank, wait))
    assert isinstance(found[0], ValueError) and "rank 1 lays out its memory in another way" in str(found[0])


def test_two_replicas_on_one_host_do_not_meet(opened, kind) -> None:
    first, second = opened(2), opened(2)
    first[0].send(b"first")
    second[0].send(b"second")
    assert (first[1].receive(5.0), second[1].receive(5.0)) == (b"first", b"second")
    first[1].board.beat()
    assert (first[0].board.row(1).beats, second[0].board.row(1).beats) == (1, 0)


def test_memory_has_no_name_and_ends_with_its_users() -> None:
    def named() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    def held() -> int:
        return sum("hybridserve-step-channel" in os.readlink(f"/proc/self/fd/{fd}") for fd in open_files())

    def open_files() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]

    before, names = held(), named()
    store = dist.HashStore()
    channels = on_threads(2, lambda rank: opening.open_channel(store, rank, 2))
    assert held() > before and named() == names
    for channel in channels:
        channel.close()
    assert held() == before


def test_a_stranger_is_not_attached() -> None:
    memory = SharedMemory.create(100)
    pid, number, token = memory.address.split()
    other = SharedMemory.attach(memory.address)
    memory.view[5] = 7
    assert other.view[5] == 7
    other.close()
    with pytest.raises(OSError, match="is another memory"):
        SharedMemory.attach(f"{pid} {number} {'0' * len(token)}")
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="is no memory"):
        SharedMemory.attach(f"{pid} {reading} {token}")
    os.close(reading)
    os.close(writing)
    with pytest.raises(FileNotFoundError):
        SharedMemory.attach(f"{pid} 999999 {token}")
    memory.close()


def test_ranks_that_cannot_share_use_the_group(opened, monkeypatch) -> None:
    assert host_identity()

    def refuse(address: str) -> SharedMemory:
        raise PermissionError(address)

    monkeypatch.setattr(SharedMemory, "attach", refuse)
    channels = opened(2)
    assert all(isinstance(channel, GroupChannel) for channel in channels)
    channels[0].send(b"x")
    assert channels[1].receive(5.0) == b"x"
