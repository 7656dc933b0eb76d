"""The causal convolution on the GPU (or interpreted): outputs and rings, on poisoned overlapping rings."""

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.causal_conv1d import cpu, triton_decode, triton_prefill
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
RAGGED = (1, 0, 2, 3, 70, 1, 64, 0, 2, 129), (0, 0, 1, 5, 2, 7, 0, 3, 64, 3)
FULL_LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 4096)


class Sequences:
    """Random inputs of S sequences of which `context_lens` tokens are in the rings already."""

    def __init__(self, rows, device, dtype, query_lens, context_lens, channels, kernel=4, bias=True):
        self.query_lens, self.context_lens, self.kernel = query_lens, context_lens, kernel
        self.weight = torch.randn(channels, kernel, device=device).to(dtype)
        self.bias = torch.randn(channels, device=device).to(dtype) if bias else None
        self.inputs = [
            torch.randn(c + n, channels, device=device).to(dtype)
            for n, c in zip(query_lens, context_lens, strict=True)
        ]
        wide = torch.cat([i[c:] for i, c in zip(self.inputs, context_lens, strict=True)])
        # a slice of a wider projection
        self.x = torch.cat((wide, torch.full_like(wide, float("nan"))), 1)[:, :channels]
        self.rows = rows((kernel, channels), len(query_lens) + 1, dtype)
        self.rows.buffer = self.rows.buffer.to(device)
        self.ring = self.rows.buffer.view(dtype).as_strided(
            self.rows.view.shape, self.rows.view.stride(), self.rows.view.storage_offset()
        )
        self.rows.view = self.ring
        self.indices = self.rows.indices[: len(query_lens)].to(device)
        self.has_initial_state = torch.tensor([c > 0 for c in context_lens], device=device)
        for s, context in enumerate(context_lens):
            if context:
                self.ring[self.indices[s]] = ring_of(self.inputs[s], context, kernel)

    def run(self, function=triton_prefill.causal_conv1d_prefill, **more):
        with poisoned_memory():
            return function(
                self.x,
                self.weight,
                self.bias,
                self.ring,
                self.indices,
                self.has_initial_state,
                self.query_lens,
                self.context_lens,
                **more,
            )

    def check(self, y):
        plain_ring = torch.full((len(self.query_lens), *self.ring.shape[1:]), float("nan"), device=y.device)
        plain_ring = plain_ring.to(self.x.dtype)
        for s, context in enumerate(self.context_lens):
            if context:
                plain_ring[s] = ring_of(self.inputs[s], context, self.kernel)
        plain = cpu.causal_conv1d_prefill(
            self.x,
            self.weight,
            self.bias,
            plain_ring,
            torch.arange(len(self.query_lens), device=y.device),
            self.has_initial_state,
            self.query_lens,
            self.context_lens,
        )
        truth = []
        for i, context, length in zip(self.inputs, self.context_lens, self.query_lens, strict=True):
            if not length:
                continue
            inputs = torch.cat((i.new_zeros(self.kernel - 1, i.shape[1]), i)).double()
            windows = inputs[context:].unfold(0, self.kernel, 1)
            exact = (windows * self.weight.double()).sum(-1)
            truth.append(exact if self.bias is None else exact + self.bias.double())
        assert_as_good_as_plain(y, plain, F.silu(torch.cat(truth)))

    def check_rings(self):
        for s, (length, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if length:
                expected = ring_of(self.inputs[s], context + length, self.kernel)
                assert torch.equal(self.ring[self.indices[s]], expected)


def ring_of(inputs, end, kernel):
    """The ring after `end` tokens of inputs [T, C]."""
    ring = torch.zeros(kernel, inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
    for p in range(max(0, end - kernel), end):
        ring[p % kernel] = inputs[p]
    return ring


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "bias"), [(2, True), (3, False), (4, False), (5, True)])
def test_prefill_ragged_with_history(device, poisoned_rows, dtype, kernel, bias):
    sequences = Sequences(poisoned_rows, device, dtype, *RAGGED, 40, kernel, bias)
    before = sequences.rows.buffer.clone()
    y = sequences.run()
    assert y.shape == sequences.x.shape and y.is_contiguous()
    sequences.check(y)
    sequences.check_rings()
    with_tokens = torch.tensor([n > 0 for n in sequences.query_lens], device=device)
    assert sequences.rows.untouched(before, sequences.indices[with_tokens])


def test_prefill_in_full(gpu, poisoned_rows):
    for context in (0, 5):
        contexts = (context,) * len(FULL_LENGTHS)
        sequences = Sequences(poisoned_rows, gpu, torch.bfloat16, FULL_LENGTHS, contexts, 8192, bias=False)
        sequences.check(sequences.run())
        sequences.check_rings()


@pytest.mark.parametrize("sizes", [(32, 16, 64), (2, 2, 3)])
def test_split_parts_are_the_channels_of_the_whole(device, poisoned_rows, sizes):
    sequences = Sequences(poisoned_rows, device, torch.float32, *RAGGED, sum(sizes))
    parts = sequences.run(triton_prefill.causal_conv1d_prefill_split, sizes=sizes)
    assert all(part.is_contiguous() for part in parts)
    sequences.check(torch.cat(parts, 1))
    sequences.check_rings()


@pytest.mark.parametrize(("taps", "ring"), [((6, 4), (4, 8)), ((8, 4), (3, 8)), ((8, 4), (4, 16))])
def test_weights_and_rings_of_another_size_are_refused(device, taps, ring):
    x, weight, rings = (torch.zeros(size, device=device) for size in ((1, 8), taps, (1, *ring)))
    index, known = torch.tensor([0], device=device), torch.tensor([True], device=device)
    with pytest.raises(AssertionError):
        triton_prefill.causal_conv1d_prefill(x, weight, None, rings, index, known, (1,), (3,))
    with pytest.raises(AssertionError):
        triton_decode.causal_conv1d_decode(x, cpu.make_phase_weight(weight), None, rings, index, index)


def test_prefill_cut_anywhere_is_bitwise_the_whole(device):
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((150, 32), (32, 4), (32,)))
    index, new, going_on = (torch.tensor(value, device=device) for value in ([0], [False], [True]))
    whole_ring = torch.full((1, 4, 32), torch.nan, device=device)
    prefill = triton_prefill.causal_conv1d_prefill
    whole = prefill(x, weight, bias, whole_ring, index, new, (150,), (0,))
    for cut in (1, 2, 3, 5, 63, 64, 66, 127, 149):
        ring = torch.full_like(whole_ring, torch.nan)
        first = prefill(x[:cut], weight, bias, ring, index, new, (cut,), (0,))
        second = prefill(x[cut:], weight, bias, ring, index, going_on, (150 - cut,), (cut,))
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(ring, whole_ring)


def test_sequences_are_bitwise_their_own_in_any_batch(device, poisoned_rows):
    sequences = Sequences(poisoned_rows, device, torch.float32, *RAGGED, 32)
    before = sequences.rows.buffer.clone()
    y = sequences.run().split(sequences.query_lens)
    rings = sequences.ring[sequences.indices]
    sequences.rows.buffer.copy_(before)
    order = torch.randperm(len(RAGGED[0])).tolist()
    sequences.x = torch.cat([sequences.x.split(sequences.query_lens)[s] for s in order])
    sequences.query_lens, sequences.context_lens = (tuple(lens[s] for s in order) for lens in RAGGED)
    sequences.indices = sequences.indices[order]
    sequences.has_initial_state = sequences.has_initial_state[order]
    assert torch.equal(sequences.run(), torch.cat([y[s] for s in order]))
    with_tokens = [s for s in range(len(order)) if sequences.query_lens[s]]
    permuted = sequences.ring[sequences.indices]
    for s in with_tokens:
        assert torch.equal(permuted[s], rings[order[s]])


def test_a_negative_index_is_no_ring(device, poisoned_rows):
    sequences = Sequences(poisoned_rows, device, torch.float32, (70, 3, 5), (0, 4, 0), 32)
    before = sequences.rows.buffer.clone()
    kept = sequences.indices[2:].clone()
    sequences.indices[:2] = -1
    y = sequences.run()
    assert sequences.rows.untouched(before, kept)
    sequences.context_lens, sequences.inputs[1] = (0, 0, 0), sequences.inputs[1][4:]
    sequences.has_initial_state[:] = False
    sequences.check(y)


def test_no_tokens_at_all_leave_the_rings_alone(device, poisoned_rows):
    sequences = Sequences(poisoned_rows, device, torch.float32, (0, 0), (0, 5), 32)
    before = sequences.rows.buffer.clone()
    assert sequences.run().shape == (0, 32)
    assert torch.equal(sequences.rows.buffer, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_decode_goes_on_as_prefill_would(device, poisoned_rows, dtype, kernel):
    contexts = (0, 1, 2, 3, 4, 70)
    sequences = Sequences(poisoned_rows, device, dtype, (6,) * len(contexts), contexts, 40, kernel)
    phase_weight = cpu.make_phase_weight(sequences.weight)
    # a sequence's first token is a prefill's; here it decodes from the ring that is zero before position 0
    sequences.ring[sequences.indices[0]] = 0
    outputs = []
    for step in range(6):
        x = sequences.x[step::6]
        positions = torch.tensor(contexts, device=device) + step
        with poisoned_memory():
            outputs.append(
                triton_decode.causal_conv1d_decode(
                    x, phase_weight, sequences.bias, sequences.ring, sequences.indices, positions
                )
            )
    y = torch.stack(outputs, 1).flatten(0, 1)
    sequences.check(y)
    sequences.check_rings()


def test_decode_leaves_padding_alone(device, poisoned_rows):
    sequences = Sequences(poisoned_rows, device, torch.float32, (1, 1, 1), (3, 4, 5), 40)
    before, kept = sequences.rows.buffer.clone(), sequences.indices[1:2].clone()
    sequences.indices[0] = sequences.indices[2] = -1
    positions = torch.tensor([3, 4, 5], device=device)
    phase_weight = cpu.make_phase_weight(sequences.weight)
    y = triton_decode.causal_conv1d_decode(
        sequences.x, phase_weight, None, sequences.ring, sequences.indices, positions
    )
    assert not y[0].any() and not y[2].any() and y[1].all()
    assert sequences.rows.untouched(before, kept)


def test_no_recompile_whatever_the_lengths(gpu, poisoned_rows, count_variants):
    def run(length, context):
        Sequences(poisoned_rows, gpu, torch.bfloat16, (length,), (context,), 512, bias=False).run()

    run(7, 0)
    before = count_variants(triton_prefill._conv_prefill_kernel)
    for length in (1, 2, 16, 63, 64, 1000, 4096):
        run(length, 0)
        run(length, length)
    assert count_variants(triton_prefill._conv_prefill_kernel) == before


def test_rings_at_the_end_of_a_large_arena(gpu):
    arena = torch.empty(11 * 2**30, dtype=torch.uint8, device=gpu)
    ring = arena.view(torch.bfloat16).as_strided(((arena.numel() - 2**20) // 256, 4, 8192), (128, 8192, 1))
    x, weight = (torch.randn(shape, device=gpu).bfloat16() for shape in ((40, 8192), (8192, 4)))
    last = torch.tensor([ring.shape[0] - 1], device=gpu)
    triton_prefill.causal_conv1d_prefill(x[:39], weight, None, ring, last, last < 0, (39,), (0,))
    expected = ring_of(x, 39, 4)
    assert torch.equal(ring[last[0]], expected)
    positions = torch.tensor([39], device=gpu)
    triton_decode.causal_conv1d_decode(x[39:], cpu.make_phase_weight(weight), None, ring, last, positions)
    assert torch.equal(ring[last[0]], ring_of(x, 40, 4))
