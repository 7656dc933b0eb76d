"""Sums over peers' memory, with virtual ranks in one process: one after another without waiting, and on a GPU
at once, each on its own stream."""

import threading

import pytest
import torch
import triton.language as tl

from hybridserve.kernels.all_reduce import triton_low_latency, triton_peers
from hybridserve.kernels.all_reduce.peers import MAX_PROGRAMS, PeerMemory, Slots, signal_bytes, slot_bytes
from hybridserve.kernels.all_reduce.reference import all_reduce_reference
from hybridserve.kernels.all_reduce.triton_low_latency import CLEARING, low_latency_all_reduce
from hybridserve.kernels.all_reduce.triton_peers import (
    ALL,
    READ,
    SUM,
    WRITE,
    one_shot_all_reduce,
    two_shot_all_reduce,
)
from hybridserve.kernels.hopper import has_dependent_launches
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
        self.max_words = half_bytes // 16 * 4
        self.slots = [
            torch.zeros(slot_bytes(world_size, self.max_words) // 8, dtype=torch.int64, device=device)
            for _ in range(world_size)
        ]
        buffers, signals, slots = (
            torch.tensor([x.data_ptr() for x in parts], dtype=torch.int64, device=device)
            for parts in (self.buffers, self.signals, self.slots)
        )
        self.calls = torch.zeros(world_size, MAX_PROGRAMS, dtype=torch.int32, device=device)
        # rows of 16 bytes: for another alignment Triton compiles anew, and no kernel loads while one waits
        self.slot_calls = torch.zeros(world_size, 4, dtype=torch.int32, device=device)[:, :2]
        self.given_up = torch.zeros(world_size, dtype=torch.int32, device=device)
        self.memory = [
            PeerMemory(
                rank,
                world_size,
                buffers,
                signals,
                self.calls[rank],
                half_bytes,
                self.given_up[rank].data_ptr(),
                Slots(slots, self.slot_calls[rank], self.max_words),
                MAX_PROGRAMS if CUDA else 2,
            )
            for rank in range(world_size)
        ]

    def counted(self, count: int) -> None:
        """As if every rank had made so many calls."""
        for rank, memory in enumerate(self.memory):
            self.calls[rank, : memory.programs] = count
            self.signals[rank][: memory.programs * 2 * memory.world_size] = count
        self.slot_calls[:, 0] = count

    def one_shot(self, inputs, sum_up=one_shot_all_reduce, **options):
        """Each rank's result, the ranks' writing coming before their reading."""
        for memory, x in zip(self.memory, inputs, strict=True):
            sum_up(memory, x, phases=WRITE)
        return [
            sum_up(memory, x, phases=READ, **options) for memory, x in zip(self.memory, inputs, strict=True)
        ]

    def two_shot(self, inputs, **options):
        for phases in (WRITE, SUM):
            for memory, x in zip(self.memory, inputs, strict=True):
                two_shot_all_reduce(memory, x, phases=phases, **options)
        return [
            two_shot_all_reduce(memory, x, phases=READ) for memory, x in zip(self.memory, inputs, strict=True)
        ]


def warm_up(streams, x):
    """Let every stream have memory of its own: once a rank waits, asking for it may wait for the rank."""
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.empty_like(x)
            torch.cuda._sleep(1)
    torch.cuda.synchronize()


def messages(world_size, shape, dtype, device):
    return [torch.randn(shape, device=device).to(dtype) for _ in range(world_size)]


def bytes_for(shape, dtype):
    return -(-shape[0] * shape[1] * dtype.itemsize // 16) * 16


# more rows than programs among them: the interpreter is given two programs
SHAPES = [(1, 64), (5, 100)] + ([(256, 4096), (1, 5120)] if CUDA else [])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """And few polls before it is asked whether waiting is given up: one takes it milliseconds."""
    if not CUDA:
        monkeypatch.setattr(triton_low_latency, "MAX_PROGRAMS", 2)
        for module in (triton_peers, triton_low_latency):
            monkeypatch.setattr(module, "POLLS", tl.constexpr(3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world_size", [2, 3, 8] if CUDA else [3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, low_latency_all_reduce])
def test_one_step_sums_adds_and_norms(sum_up, dtype, world_size, shape, device):
    ranks = Ranks(world_size, bytes_for(shape, dtype) + 48, device)
    for _ in range(3):
        inputs = messages(world_size, shape, dtype, device)
        residual = torch.randn(shape, device=device).to(dtype)
        weight = torch.rand(shape[1], device=device) + 0.5
        results = ranks.one_shot(inputs, sum_up, residual=residual, weight=weight, eps=EPS)
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
    programs = ranks.memory[0].programs
    assert ranks.calls[0, :programs].tolist() == [1] * programs
    assert ranks.calls[1, :programs].tolist() == [2] * programs


def test_a_message_that_does_not_fit_is_refused(device):
    ranks = Ranks(2, 496, device)
    with pytest.raises(ValueError, match="2 x 64 elements, 512 bytes, does not fit the 496"):
        one_shot_all_reduce(ranks.memory[0], torch.zeros(2, 64, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 8] if CUDA else [2, 3])
def test_words_give_the_one_shots_bits(world_size, dtype, device):
    """Of rows that end within a word, and of all numbers there are: zeros of both signs, infinities, NaN."""
    ranks = Ranks(world_size, 2048, device)
    for shape in ((3, 37), (1, 1), (1, 64), (5, 2)):
        inputs = messages(world_size, shape, dtype, device)
        for rank, x in enumerate(inputs):
            x.view(-1)[:1] = (-0.0, float("inf"), float("nan"))[rank % 3]
        residual = torch.randn(shape, device=device).to(dtype)
        wanted = ranks.one_shot(inputs, residual=residual)[0][0]
        for total, normed in ranks.one_shot(inputs, low_latency_all_reduce, residual=residual):
            assert normed is None
            torch.testing.assert_close(total, wanted, rtol=0, atol=0, equal_nan=True)


def test_words_of_a_call_outlast_the_next_ones(device):
    """A rank that is a call ahead, with a message of other rows."""
    ranks = Ranks(2, 1024, device)
    first = messages(2, (5, 16), torch.float32, device)
    for memory, x in zip(ranks.memory, first, strict=True):
        low_latency_all_reduce(memory, x, phases=WRITE)
    low_latency_all_reduce(ranks.memory[1], torch.ones(1, 80, device=device), phases=WRITE)
    got, _ = low_latency_all_reduce(ranks.memory[0], first[0], phases=READ)
    assert torch.equal(got, first[0] + first[1])
    # the calls are counted once, whatever number of programs they have
    assert ranks.slot_calls.tolist() == [[1, 0], [2, 0]]


@pytest.mark.parametrize("count", [0x3F3F3F3F, 2**31 - 3, -3])
def test_calls_may_be_counted_beyond_all_numbers(count, device):
    ranks = Ranks(2, 1024, device)
    ranks.counted(count)
    for _ in range(5):
        inputs = messages(2, (3, 16), torch.float32, device)
        for sum_up in (one_shot_all_reduce, low_latency_all_reduce):
            for total, _ in ranks.one_shot(inputs, sum_up):
                assert torch.equal(total, inputs[0] + inputs[1])
    wanted = (count + 5 + 2**31) % 2**32 - 2**31
    assert ranks.calls[0, 0] == wanted and ranks.slot_calls[0].tolist() == [wanted, 0]


@pytest.mark.parametrize("count", [5, 0x3F3F3F40, 2**31 - 2, 2**31 - 1, -1])
def test_who_has_come_is_not_waited_for(count, device):
    ranks = Ranks(2, 1024, device)
    ranks.counted(count)
    ranks.buffers[1].view(torch.float32)[:] = 2.0
    come(ranks, 1)
    x = torch.ones(1, 16, device=device)
    assert torch.equal(one_shot_all_reduce(ranks.memory[0], x)[0], x + 2)


@pytest.mark.skipif(CUDA, reason="is about kernels that are interpreted: a GPU has tests of its own")
@pytest.mark.parametrize("count", [5, 0x3F3F3F40, 2**31 - 2, 2**31 - 1, -1])
@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, low_latency_all_reduce])
def test_who_has_not_come_is_waited_for(sum_up, count, device):
    """Whether it is one call behind or half of all numbers."""
    ranks = Ranks(2, 1024, device)
    ranks.counted(count)
    come(ranks, -(2**31) + 8)
    given_up = threading.Event()

    def give_up() -> None:
        given_up.set()
        ranks.given_up[0] = 1

    timer = threading.Timer(0.2, give_up)
    timer.start()
    sum_up(ranks.memory[0], torch.ones(1, 16, device=device))
    assert given_up.is_set()
    timer.join()


def come(ranks, calls):
    """Rank 1 tells rank 0 that it has made so many calls more."""
    ranks.signals[0][: ranks.memory[0].programs * 4].view(-1, 2, 2)[:, 0, 1] += calls


@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, two_shot_all_reduce, low_latency_all_reduce])
def test_nobody_is_waited_for_once_it_is_given_up(sum_up, device):
    ranks = Ranks(3, 1024, device)
    ranks.given_up[1] = -1
    x = torch.ones(3, 16, device=device)
    for _ in range(3):
        sum_up(ranks.memory[1], x, phases=ALL)
    # by a word of its own: the signals say what they said
    assert ranks.signals[1].max() == (0 if sum_up is low_latency_all_reduce else 3)


@pytest.mark.parametrize("half", [0, 1])
def test_old_words_are_cleared_before_their_numbers_come_again(half, device):
    """What a long message left is cleared by a short one, 2**30 calls later: the rest of its half alone."""
    ranks = Ranks(2, 1024, device)
    ranks.counted(7 + half)
    long = messages(2, (8, 32), torch.float32, device)
    for _ in range(2):
        ranks.one_shot(long, low_latency_all_reduce)
    halves = ranks.slots[0].view(2, 2, ranks.max_words)
    assert (halves[:, 1] != 0).all()
    ranks.counted(CLEARING.value + half)
    short = messages(2, (1, 32), torch.float32, device)
    ranks.one_shot(short, low_latency_all_reduce)
    assert not halves[half, 1, 32:].any() and (halves[1 - half, 1] != 0).all()
    # what it read itself bears its number
    assert (halves[half, 1, :32] >> 32 == (CLEARING.value + 1 + half) | 1).all()


def test_a_message_that_does_not_fit_the_slots_is_refused(device):
    ranks = Ranks(2, 496, device)
    with pytest.raises(ValueError, match="2 x 125 elements of 2 bytes does not fit 124 words of 4"):
        low_latency_all_reduce(ranks.memory[0], torch.zeros(2, 125, dtype=torch.bfloat16, device=device))
    with pytest.raises(ValueError, match="1 x 8 elements of 8 bytes"):
        low_latency_all_reduce(ranks.memory[0], torch.zeros(1, 8, dtype=torch.float64, device=device))


@pytest.mark.skipif(not CUDA, reason="needs a GPU: ranks that run at once")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_run_at_once_wait_for_each_other(world_size, device):
    """Many calls in a row; a rank that is late holds the others up and spoils nothing."""
    shape, dtype, calls = (16, 1024), torch.bfloat16, 20
    ranks = Ranks(world_size, bytes_for(shape, dtype), device)
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    sent = [messages(world_size, shape, dtype, device) for _ in range(calls)]
    got: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    warm_up(streams, sent[0][0])
    for call in range(calls):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (call + rank) % 5 == 0:
                    torch.cuda._sleep(2_000_000)
                which = (two_shot_all_reduce, one_shot_all_reduce, low_latency_all_reduce)[call % 3]
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
@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, two_shot_all_reduce, low_latency_all_reduce])
def test_waiting_ends_when_it_is_given_up(sum_up, device):
    """A rank whose peer is gone waits until a word says not to, in its later calls, too."""
    ranks = Ranks(2, 1024, device)
    x = torch.ones(1, 64, device=device)
    other, waiting = torch.cuda.Stream(), torch.cuda.Event()
    warm_up([other], x)
    # what writes the bytes is loaded now, too
    with torch.cuda.stream(other):
        ranks.given_up.fill_(0)
    torch.cuda.synchronize()
    for _ in range(3):
        sum_up(ranks.memory[0], x)
    waiting.record()
    assert not waiting.query()
    with torch.cuda.stream(other):
        ranks.given_up.fill_(1)
    torch.cuda.synchronize()
    assert waiting.query()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, two_shot_all_reduce, low_latency_all_reduce])
def test_sums_of_one_rank_follow_each_other_early_or_not(sum_up, dependent, device):
    """Each takes what the one before it wrote."""
    if dependent and not has_dependent_launches(device):
        pytest.skip("needs a GPU of compute capability 9.0")
    ranks = Ranks(1, 2**16, device)
    x = first = torch.arange(4096, device=device).view(4, 1024) / 8
    # before the sums, so that nothing comes between them
    added = [first * turn for turn in range(3, 9)]
    for residual in added:
        total = sum_up(ranks.memory[0], x, residual=residual, dependent=dependent)
        x = total[0] if isinstance(total, tuple) else total
    assert torch.equal(x, first * (1 + sum(range(3, 9))))


@pytest.mark.skipif(not CUDA, reason="needs a GPU: compiled kernels")
@pytest.mark.parametrize("sum_up", [one_shot_all_reduce, two_shot_all_reduce, low_latency_all_reduce])
def test_peers_are_read_sixteen_bytes_at_a_time(sum_up, device):
    """Addresses that come out of a table are not known to be aligned unless the kernel says so."""
    ranks = Ranks(1, 4096, device)
    sum_up(ranks.memory[0], torch.ones(1, 2048, dtype=torch.bfloat16, device=device))
    name = f"_{sum_up.__name__.removesuffix('_all_reduce')}_kernel"
    kernel = getattr(triton_low_latency if sum_up is low_latency_all_reduce else triton_peers, name)
    found = [one.asm["ptx"] for cache in kernel.device_caches.values() for one in cache[0].values()]
    # a word of 4 bytes is whether waiting is given up; what other tests compiled is among them
    reads = [[line for line in ptx.splitlines() if "ld.volatile.global" in line] for ptx in found]
    assert any(
        sum(".v4.b32" in line or ".v2.b64" in line for line in lines) >= max(1, len(lines) - 1)
        for lines in reads
    )
