"""Sums that are begun and ended: ranks one after another in this process, and a driver whose memory is
torch's."""

import runpy
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from hybridserve.kernels.all_reduce.exchange import SLOTS, exchange_bytes, flag_offset, slot_offset
from hybridserve.kernels.all_reduce.reference import all_reduce_reference
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory
from hybridserve.parallel import exchange as exchange_module
from hybridserve.parallel.exchange import PeerExchange, open_exchange

HostDriver = runpy.run_path(str(Path(__file__).with_name("test_peer_memory.py")))["HostDriver"]
CPU = torch.device("cpu")
PIECE = 4096
EPS = 1e-6

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="is about the interpreted kernel; test_gpus.py runs the compiled one between two GPUs",
)


class Norm(NamedTuple):
    weight: torch.Tensor
    eps: float = EPS


def opened(world_size: int, piece_bytes: int = PIECE) -> tuple[list[PeerExchange], list[torch.Tensor]]:
    """All ranks' exchanges and their memory, whose parts are NaN."""
    drivers = [HostDriver() for _ in range(world_size)]
    store, found = dist.HashStore(), [None] * world_size

    def run(rank: int) -> None:
        found[rank] = open_exchange(rank, world_size, store, CPU, piece_bytes, driver=drivers[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(one is not None and one[0] is not None for one in found), found
    memory = [next(iter(driver.held.values())) for driver in drivers]
    for block in memory:
        block[: flag_offset(0, 0, world_size, piece_bytes)] = 0xFF
    return [one[0] for one in found], memory


def parts_of(world_size: int, shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(world_size)]


@interpreted
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (7, 257)])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_add_the_residual_and_norm(monkeypatch, dtype, world_size, shape) -> None:
    monkeypatch.setattr(exchange_module, "MAX_RANKS", 3)
    ranks, _ = opened(world_size, 8192)
    for _ in range(SLOTS + 1):
        parts = parts_of(world_size, shape, dtype)
        residual = torch.randn(shape).to(dtype)
        norm = Norm(torch.rand(shape[1]) + 0.5)
        begun = [rank.begin(x, residual) for rank, x in zip(ranks, parts, strict=True)]
        with poisoned_memory():
            results = [one.end(norm) for one in begun]
        for total, normed in results[1:]:
            assert torch.equal(total, results[0][0]) and torch.equal(normed, results[0][1])
        truth, _ = all_reduce_reference([x.double() for x in parts], residual.double())
        plain = all_reduce_reference([x.float() for x in parts], residual.float())[0].to(dtype)
        assert_as_good_as_plain(results[0][0], plain, truth)
        # the norm is of the sum as it was rounded
        _, truth = all_reduce_reference([results[0][0].double()], weight=norm.weight.double(), eps=EPS)
        plain = all_reduce_reference([results[0][0].float()], weight=norm.weight, eps=EPS)[1].to(dtype)
        assert_as_good_as_plain(results[0][1], plain, truth)


@interpreted
def test_two_under_way_and_numbers_that_come_round() -> None:
    """One rank is as far ahead as it may be, and nothing that the other still needs is overwritten."""
    ranks, _ = opened(2)
    norm, residual = Norm(torch.ones(16)), torch.zeros(4, 16)
    for rank in ranks:
        rank._calls = exchange_module._NUMBERS - 6
    sent = [parts_of(2, (4, 16), torch.float32) for _ in range(20)]
    slow = [ranks[1].begin(sent[call][1], residual) for call in (0, 1)]
    fast = [ranks[0].begin(sent[call][0], residual) for call in (0, 1)]
    for call in range(len(sent)):
        # rank 0 ends a sum and begins the one after next, before rank 1 has ended as many
        for under_way, rank in ((fast, 0), (slow, 1)):
            total, _ = under_way.pop(0).end(norm)
            assert torch.equal(total, sent[call][0] + sent[call][1])
            if call + 2 < len(sent):
                under_way.append(ranks[rank].begin(sent[call + 2][rank], residual))


def test_the_order_of_calls_is_held_to() -> None:
    ranks, _ = opened(2)
    x = torch.zeros(2, 8)
    first, second = (ranks[0].begin(x, x) for _ in range(2))
    with pytest.raises(AssertionError, match="too many sums"):
        ranks[0].begin(x, x)
    with pytest.raises(AssertionError, match=f"sum {second.call} is ended before {first.call}"):
        second.end(Norm(torch.ones(8)))


def test_a_part_lies_in_its_place_alone() -> None:
    ranks, memory = opened(2)
    x = torch.arange(8.0).view(1, 8)
    call = ranks[1].begin(x, x).call
    start = slot_offset(call % SLOTS, 1, 0, 2, PIECE)
    assert torch.equal(memory[0][start : start + 32].view(torch.float32), x[0])
    flag = flag_offset(call % SLOTS, 1, 2, PIECE)
    changed = torch.ones(memory[0].numel(), dtype=torch.bool)
    changed[start : start + 32] = changed[flag : flag + 4] = False
    expected = torch.zeros_like(memory[0])
    expected[: flag_offset(0, 0, 2, PIECE)] = 0xFF
    assert torch.equal(memory[0][changed], expected[changed])
    assert memory[0][flag : flag + 4].view(torch.int32).item() == call


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_no_two_things_share_memory(world_size: int) -> None:
    taken: set[int] = set()
    for receiver in (0, world_size - 1):
        taken.clear()
        for slot in range(SLOTS):
            for sender in range(world_size):
                flag = flag_offset(slot, sender, world_size, 64)
                places = [*range(flag, flag + 4)]
                if sender != receiver:
                    start = slot_offset(slot, sender, receiver, world_size, 64)
                    places += range(start, start + 64)
                assert not taken.intersection(places)
                taken.update(places)
        last = exchange_bytes(world_size, 64) - 4
        assert max(taken) == last - 1


@interpreted
def test_giving_up_ends_waiting_for_parts_that_never_come() -> None:
    ranks, memory = opened(2)
    x = torch.zeros(2, 8)
    before = memory[0].clone()
    ranks[0].abort()
    assert torch.equal(memory[0][:-4], before[:-4]) and memory[0][-4:].view(torch.int32).item() != 0
    for _ in range(SLOTS):
        # it comes back
        ranks[0].begin(x, x).end(Norm(torch.ones(8)))


def test_what_is_closed_is_let_go_once_and_written_no_more() -> None:
    ranks, memory = opened(2)
    driver, before = ranks[0]._driver, memory[0].clone()
    ranks[0].close()
    assert not driver.held and not driver.opened
    assert ranks[1]._driver.held and ranks[1]._driver.opened
    ranks[0].close()
    ranks[0].abort()
    assert torch.equal(memory[0], before)


def test_messages_it_takes() -> None:
    rank = opened(2)[0][0]
    assert rank.takes(1, 1024, torch.float32) and not rank.takes(1, 1025, torch.float32)
    assert rank.takes(2, 1024, torch.bfloat16) and not rank.takes(0, 8, torch.bfloat16)
    assert not rank.takes(1, 8, torch.int64)
    x = torch.zeros(2, 1024)
    with pytest.raises(ValueError, match="2 x 1024 torch.float32, 8192 bytes, is none of at most 4096 bytes"):
        rank.begin(x, x)


def test_more_ranks_are_left_to_a_ring() -> None:
    assert open_exchange(0, 3, dist.HashStore(), CPU, PIECE, driver=HostDriver()) == (
        None,
        "between 3 ranks a ring sends fewer bytes",
    )


@pytest.mark.parametrize("what", ["open", "write"])
def test_what_cannot_be_shared_is_named(what: str) -> None:
    store = dist.HashStore()
    drivers = [HostDriver(fails=what), HostDriver()]
    found: list = [None, None]

    def run(rank: int) -> None:
        found[rank] = open_exchange(rank, 2, store, CPU, PIECE, driver=drivers[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for exchange, reason in found:
        assert exchange is None and f"rank 0: {what} fails here" in reason
    assert not any(driver.held or driver.opened for driver in drivers)
