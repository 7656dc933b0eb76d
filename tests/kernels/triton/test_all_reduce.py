"""Sums over peers' memory, with virtual ranks in one process: one after another without waiting, and on a GPU
at once, each on its own stream."""

import pytest
import torch

from hybridserve.kernels.all_reduce import triton_peers
from hybridserve.kernels.all_reduce.peers import GIVEN_UP, MAX_PROGRAMS, PeerMemory, signal_bytes
from hybridserve.kernels.all_reduce.reference import all_reduce_reference
from hybridserve.kernels.all_reduce.triton_peers import (
    READ,
    SUM,
    WRITE,
    one_shot_all_reduce,
    two_shot_all_reduce,
)
from hybridserve.kernels.testing import assert_as_good_as_plain

CUDA = torch.cuda.is_available()
EPS = 1e-6


class Ranks:
    """Virtual ranks whose buffers lie in one process, poisoned."""

    def __init__(self, world_size: int, half_bytes: int, device: torch.device) -> None:
        self.buffers = [
            torch.full((2 * half_bytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(world_size)
        ]
        self.signals = [
            torch.zeros(signal_bytes(world_size) // 4, dtype=torch.int32, device=device)
            for _ in range(world_size)
        ]
        tables = [
            torch.tensor([x.data_ptr() for x in parts], dtype=torch.int64, device=device)
            for parts in (self.buffers, self.signals)
        ]
        self.calls = torch.zeros(world_size, MAX_PROGRAMS, dtype=torch.int32, device=device)
        self.memory = [
            PeerMemory(rank, world_size, *tables, self.calls[rank], half_bytes) for rank in range(world_size)
        ]

    def one_shot(self, inputs, **options):
        """Each rank's result, the ranks' writing coming before their reading."""
        for memory, x in zip(self.memory, inputs, strict=True):
            one_shot_all_reduce(memory, x, phases=WRITE)
        return [
            one_shot_all_reduce(memory, x, phases=READ, **options)
            for memory, x in zip(self.memory, inputs, strict=True)
        ]

    def two_shot(self, inputs, **options):
        for phases in (WRITE, SUM):
            for memory, x in zip(self.memory, inputs, strict=True):
                two_shot_all_reduce(memory, x, phases=phases, **options)
        return [
            two_shot_all_reduce(memory, x, phases=READ) for memory, x in zip(self.memory, inputs, strict=True)
        ]


def messages(world_size, shape, dtype, device):
    return [torch.randn(shape, device=device).to(dtype) for _ in range(world_size)]


def bytes_for(shape, dtype):
    return -(-shape[0] * shape[1] * dtype.itemsize // 16) * 16


# more rows than programs among them: the interpreter is given two programs
SHAPES = [(1, 64), (5, 100)] + ([(256, 4096), (1, 5120)] if CUDA else [])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if not CUDA:
        monkeypatch.setattr(triton_peers, "MAX_PROGRAMS", 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", [2, 3, 8] if CUDA else [3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_shot_sums_adds_and_norms(dtype, world_size, shape, device):
    ranks = Ranks(world_size, bytes_for(shape, dtype) + 48, device)
    for _ in range(3):
        inputs = messages(world_size, shape, dtype, device)
        residual = torch.randn(shape, device=device).to(dtype)
        weight = torch.rand(shape[1], device=device) + 0.5
        results = ranks.one_shot(inputs, residual=residual, weight=weight, eps=EPS)
        for total, normed in results[1:]:
            assert torch.equal(total, results[0][0]) and torch.equal(normed, results[0][1])
        wide = [x.double() for x in inputs]
        truth, _ = all_reduce_reference(wide, residual.double())
        plain = all_reduce_reference([x.float() for x in inputs], residual.float())[0].to(dtype)
        assert_as_good_as_plain(results[0][0], plain, truth)
        # the norm is of the sum as it was rounded
        _, truth = all_reduce_reference([results[0][0].double()], weight=weight.double(), eps=EPS)
        plain = all_reduce_reference([results[0][0].float()], weight=weight, eps=EPS)[1].to(dtype)
        assert_as_good_as_plain(results[0][1], plain, truth)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", [2, 3, 4] if CUDA else [2, 3])
def test_two_shot_gives_the_one_shots_bits(world_size, shape, device):
    ranks = Ranks(world_size, bytes_for(shape, torch.float32), device)
    for _ in range(2):
        inputs = messages(world_size, shape, torch.float32, device)
        residual = torch.randn(shape, device=device)
        wanted, _ = ranks.one_shot(inputs, residual=residual)[0]
        for got in ranks.two_shot(inputs, residual=residual):
            assert torch.equal(got, wanted)


def test_calls_take_the_halves_in_turn_whatever_their_sizes(device):
    """What a rank wrote in a call is still there while the next one, of other rows, is written."""
    ranks = Ranks(2, 1024, device)
    first = messages(2, (5, 16), torch.float32, device)
    for memory, x in zip(ranks.memory, first, strict=True):
        one_shot_all_reduce(memory, x, phases=WRITE)
    wanted = first[0] + first[1]
    # rank 1 is a call ahead
    one_shot_all_reduce(ranks.memory[1], first[1] * 2, phases=WRITE)
    assert torch.equal(one_shot_all_reduce(ranks.memory[0], first[0], phases=READ)[0], wanted)
    # every program has counted every call, those without rows too
    programs = triton_peers.MAX_PROGRAMS
    assert ranks.calls[0, :programs].tolist() == [1] * programs
    assert ranks.calls[1, :programs].tolist() == [2] * programs


def test_a_message_that_does_not_fit_is_refused(device):
    ranks = Ranks(2, 496, device)
    with pytest.raises(ValueError, match="2 x 64 elements, 512 bytes, does not fit the 496"):
        one_shot_all_reduce(ranks.memory[0], torch.zeros(2, 64, device=device))


@pytest.mark.skipif(not CUDA, reason="needs a GPU: ranks that run at once")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_run_at_once_wait_for_each_other(world_size, device):
    """Many calls in a row, captured too; a rank that is late holds the others up and spoils nothing."""
    shape, dtype, calls = (16, 1024), torch.bfloat16, 20
    ranks = Ranks(world_size, bytes_for(shape, dtype), device)
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    sent = [messages(world_size, shape, dtype, device) for _ in range(calls)]
    got: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    # so that each stream has memory for its results: asking for some may wait for kernels that wait
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.empty_like(sent[0][rank])
    torch.cuda.synchronize()
    for call in range(calls):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (call + rank) % 5 == 0:
                    torch.cuda._sleep(2_000_000)
                which = one_shot_all_reduce if call % 3 else two_shot_all_reduce
                result = which(ranks.memory[rank], sent[call][rank])
                got[rank].append(result[0] if isinstance(result, tuple) else result)
    torch.cuda.synchronize()
    for call in range(calls):
        truth, _ = all_reduce_reference([x.double() for x in sent[call]])
        plain = all_reduce_reference([x.float() for x in sent[call]])[0].to(dtype)
        for rank in range(world_size):
            assert torch.equal(got[rank][call], got[0][call])
            assert_as_good_as_plain(got[rank][call], plain, truth)


@pytest.mark.skipif(not CUDA, reason="needs a GPU: a rank that waits")
def test_waiting_ends_when_it_is_given_up(device):
    """A rank whose peer is gone spins until its signals are overwritten, and so do its later calls."""
    ranks = Ranks(2, 1024, device)
    x = torch.ones(1, 64, device=device)
    torch.cuda.synchronize()
    for _ in range(3):
        one_shot_all_reduce(ranks.memory[0], x)
    waiting = torch.cuda.Event()
    waiting.record()
    assert not waiting.query()
    with torch.cuda.stream(torch.cuda.Stream()):
        ranks.signals[0].view(torch.uint8).fill_(GIVEN_UP)
    torch.cuda.synchronize()
    assert waiting.query()
