"""Sums over peers' memory, with virtual ranks in one process: one after another without waiting, and on a GPU
at once, each on its own stream."""

import pytest
import torch

from hybridserve.kernels.all_reduce import triton_peers
from hybridserve.kernels.all_reduce.peers import MAX_PROGRAMS, PeerMemory, signal_bytes
from hybridserve.kernels.all_reduce.reference import all_reduce_reference
from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce, two_shot_all_reduce
from hybridserve.kernels.testing import assert_as_good_as_plain

CUDA = torch.cuda.is_available()
EPS = 1e-6


class Ranks:
    """Virtual ranks whose buffers lie in one process, poisoned."""

    def __init__(self, world_size: int, half: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffers = [
            torch.full((2 * half,), float("nan"), dtype=dtype, device=device) for _ in range(world_size)
        ]
        self.signals = [
            torch.zeros(signal_bytes(world_size) // 4, dtype=torch.int32, device=device)
            for _ in range(world_size)
        ]
        tables = [
            torch.tensor([x.data_ptr() for x in parts], dtype=torch.int64, device=device)
            for parts in (self.buffers, self.signals)
        ]
        self.memory = [
            PeerMemory(
                rank, world_size, *tables, torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device), half
            )
            for rank in range(world_size)
        ]

    def write(self, half: int, inputs: list[torch.Tensor]) -> None:
        for memory, buffer, x in zip(self.memory, self.buffers, inputs, strict=True):
            buffer[half * memory.half_elements :][: x.numel()] = x.flatten()


def messages(world_size, shape, dtype, device):
    return [torch.randn(shape, device=device).to(dtype) for _ in range(world_size)]


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
    ranks = Ranks(world_size, shape[0] * shape[1] + 7, dtype, device)
    for half in (1, 0):
        inputs = messages(world_size, shape, dtype, device)
        residual = torch.randn(shape, device=device).to(dtype)
        weight = torch.rand(shape[1], device=device) + 0.5
        ranks.write(half, inputs)
        results = [
            one_shot_all_reduce(m, shape, dtype, half, residual=residual, weight=weight, eps=EPS, sync=False)
            for m in ranks.memory
        ]
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
    ranks = Ranks(world_size, shape[0] * shape[1], torch.float32, device)
    inputs = messages(world_size, shape, torch.float32, device)
    residual = torch.randn(shape, device=device)
    ranks.write(1, inputs)
    wanted, _ = one_shot_all_reduce(ranks.memory[0], shape, torch.float32, 1, residual=residual, sync=False)
    for memory in ranks.memory:
        two_shot_all_reduce(memory, shape, torch.float32, 1, residual=residual, sync=False, phase=0)
    for memory in ranks.memory:
        got = two_shot_all_reduce(memory, shape, torch.float32, 1, residual=residual, sync=False, phase=1)
        assert torch.equal(got, wanted)


def test_a_message_that_does_not_fit_is_refused(device):
    ranks = Ranks(2, 100, torch.float32, device)
    with pytest.raises(ValueError, match="2 x 64 elements does not fit the 100"):
        one_shot_all_reduce(ranks.memory[0], (2, 64), torch.float32, 0)


@pytest.mark.skipif(not CUDA, reason="needs a GPU: ranks that run at once")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_run_at_once_wait_for_each_other(world_size, device):
    """Many calls in a row, captured too; a rank that is late holds the others up and spoils nothing."""
    shape, dtype, calls = (16, 1024), torch.bfloat16, 20
    ranks = Ranks(world_size, shape[0] * shape[1], dtype, device)
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    sent = [messages(world_size, shape, dtype, device) for _ in range(calls)]
    got: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    torch.cuda.synchronize()
    for call in range(calls):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (call + rank) % 5 == 0:
                    torch.cuda._sleep(2_000_000)
                half = call % 2
                ranks.buffers[rank][half * ranks.memory[rank].half_elements :][: shape[0] * shape[1]] = sent[
                    call
                ][rank].flatten()
                which = one_shot_all_reduce if call % 3 else two_shot_all_reduce
                result = which(ranks.memory[rank], shape, dtype, half)
                got[rank].append(result[0] if isinstance(result, tuple) else result)
    torch.cuda.synchronize()
    for call in range(calls):
        truth, _ = all_reduce_reference([x.double() for x in sent[call]])
        plain = all_reduce_reference([x.float() for x in sent[call]])[0].to(dtype)
        for rank in range(world_size):
            assert torch.equal(got[rank][call], got[0][call])
            assert_as_good_as_plain(got[rank][call], plain, truth)
