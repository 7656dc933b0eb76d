"""The causal convolution: prefill and decode against the reference in fp64, on poisoned overlapping rings."""

import pytest
import torch

from hybridserve.kernels.causal_conv1d import (
    causal_conv1d_decode,
    causal_conv1d_prefill,
    make_phase_weight,
)
from hybridserve.kernels.causal_conv1d.reference import causal_conv1d_reference

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000)
CHANNELS = 40
# whole vector registers: then no element falls into a loop's scalar rest, and bits do not depend on the cut
WIDE = 64


def ring_of(inputs: torch.Tensor, end: int, kernel: int) -> torch.Tensor:
    """The ring after `end` tokens of inputs [T, C]."""
    ring = torch.zeros(kernel, inputs.shape[1], dtype=inputs.dtype)
    for p in range(max(0, end - kernel), end):
        ring[p % kernel] = inputs[p]
    return ring


def history_of(inputs: torch.Tensor, start: int, kernel: int) -> torch.Tensor:
    padded = torch.cat((torch.zeros(kernel - 1, inputs.shape[1], dtype=inputs.dtype), inputs))
    return padded[start : start + kernel - 1]


def check_prefill(query_lens, context_lens, poisoned_rows, assert_accurate, kernel=4, bias=True) -> None:
    count = len(query_lens)
    weight, bias = torch.randn(CHANNELS, kernel), torch.randn(CHANNELS) if bias else None
    inputs = [torch.randn(c + n, CHANNELS) for n, c in zip(query_lens, context_lens, strict=True)]
    rows = poisoned_rows((kernel, CHANNELS), count + 1)
    indices = rows.indices[:count]
    has_initial_state = torch.tensor([c > 0 for c in context_lens])
    for s, context in enumerate(context_lens):
        if context:
            rows.view[indices[s]] = ring_of(inputs[s], context, kernel)
    before = rows.buffer.clone()
    x = torch.cat([i[c:] for i, c in zip(inputs, context_lens, strict=True)])
    y = causal_conv1d_prefill(
        x, weight, bias, rows.view, indices, has_initial_state, query_lens, context_lens
    )
    assert rows.untouched(before, indices[torch.tensor([n > 0 for n in query_lens])])
    results = []
    for dtype in (torch.float64, torch.float32):
        parts = []
        for i, context in zip(inputs, context_lens, strict=True):
            history = history_of(i, context, kernel).to(dtype)
            tail = None if bias is None else bias.to(dtype)
            parts.append(causal_conv1d_reference(i[context:].to(dtype), weight.to(dtype), tail, history))
        results.append(torch.cat(parts))
    assert_accurate(y, *results)
    for s, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if length:
            assert torch.equal(rows.view[indices[s]], ring_of(inputs[s], context + length, kernel))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_lengths(length, poisoned_rows, assert_accurate):
    check_prefill((length,), (0,), poisoned_rows, assert_accurate)


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_prefill_ragged_with_history(kernel, bias, poisoned_rows, assert_accurate):
    query_lens = (1, 0, 2, 3, 100, 1, 64, 0, 2, 129)
    context_lens = (0, 0, 1, 5, 2, 7, 0, 3, 64, 3)
    check_prefill(query_lens, context_lens, poisoned_rows, assert_accurate, kernel, bias)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_prefill_in_small_chunks_is_bitwise_the_whole(size):
    x, weight = torch.randn(90, WIDE), torch.randn(WIDE, 4)
    ring, whole_ring = torch.full((1, 4, WIDE), torch.nan), torch.full((1, 4, WIDE), torch.nan)
    index = torch.tensor([0])
    whole = causal_conv1d_prefill(x, weight, None, whole_ring, index, torch.tensor([False]), (90,), (0,))
    parts = []
    for start in range(0, 90, size):
        part = x[start : start + size]
        has = torch.tensor([start > 0])
        parts.append(causal_conv1d_prefill(part, weight, None, ring, index, has, (len(part),), (start,)))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(ring, whole_ring)


def test_prefill_cut_anywhere_is_bitwise_the_whole():
    x, weight, bias = torch.randn(90, WIDE), torch.randn(WIDE, 4), torch.randn(WIDE)
    index, new, going_on = torch.tensor([0]), torch.tensor([False]), torch.tensor([True])
    whole_ring = torch.full((1, 4, WIDE), torch.nan)
    whole = causal_conv1d_prefill(x, weight, bias, whole_ring, index, new, (90,), (0,))
    for cut in range(1, 90):
        ring = torch.full((1, 4, WIDE), torch.nan)
        first = causal_conv1d_prefill(x[:cut], weight, bias, ring, index, new, (cut,), (0,))
        second = causal_conv1d_prefill(x[cut:], weight, bias, ring, index, going_on, (90 - cut,), (cut,))
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(ring, whole_ring)


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_decode_follows_prefill(batch, kernel, poisoned_rows, assert_accurate):
    weight, bias = torch.randn(CHANNELS, kernel), torch.randn(CHANNELS)
    rows = poisoned_rows((kernel, CHANNELS), batch + 1)
    indices = rows.indices[:batch]
    inputs = [torch.randn(1 + b + 6, CHANNELS) for b in range(batch)]
    for b in range(batch):
        rows.view[indices[b]] = ring_of(inputs[b], 1 + b, kernel)
    before, phase_weight = rows.buffer.clone(), make_phase_weight(weight)
    for step in range(6):
        positions = torch.arange(batch) + 1 + step
        x = torch.stack([inputs[b][positions[b]] for b in range(batch)])
        y = causal_conv1d_decode(x, phase_weight, bias, rows.view, indices, positions)
        for b, p in enumerate(positions.tolist()):
            exact, plain = (
                causal_conv1d_reference(
                    x[b : b + 1].to(dtype),
                    weight.to(dtype),
                    bias.to(dtype),
                    history_of(inputs[b], p, kernel).to(dtype),
                )
                for dtype in (torch.float64, torch.float32)
            )
            assert_accurate(y[b : b + 1], exact, plain)
            assert torch.equal(rows.view[indices[b]], ring_of(inputs[b], p + 1, kernel))
    assert rows.untouched(before, indices)


def test_decode_rows_are_bitwise_their_own_in_any_batch():
    phase_weight = make_phase_weight(torch.randn(WIDE, 4))
    x, positions, initial = torch.randn(9, WIDE), torch.arange(9) * 3, torch.randn(9, 4, WIDE)
    ring = initial.clone()
    y = causal_conv1d_decode(x, phase_weight, None, ring, torch.arange(9), positions)
    order = torch.randperm(9)
    permuted = causal_conv1d_decode(x[order], phase_weight, None, initial.clone(), order, positions[order])
    assert torch.equal(permuted, y[order])
    for b in range(9):
        one = slice(b, b + 1)
        alone = causal_conv1d_decode(
            x[one], phase_weight, None, initial.clone(), torch.tensor([b]), positions[one]
        )
        assert torch.equal(alone[0], y[b])


def test_bfloat16_ring_keeps_the_inputs_and_computes_in_fp32(poisoned_rows):
    x, weight = torch.randn(20, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4).bfloat16()
    rows = poisoned_rows((4, CHANNELS), 1, torch.bfloat16)
    new = torch.tensor([False])
    y = causal_conv1d_prefill(x[:19], weight, None, rows.view, rows.indices, new, (19,), (0,))
    last = causal_conv1d_decode(
        x[19:], make_phase_weight(weight), None, rows.view, rows.indices, torch.tensor([19])
    )
    history = torch.zeros(3, CHANNELS, dtype=torch.float64)
    exact = causal_conv1d_reference(x.double(), weight.double(), None, history)
    assert y.dtype == last.dtype == torch.bfloat16
    assert torch.allclose(torch.cat((y, last)).double(), exact, rtol=2**-8, atol=1e-6)
    assert torch.equal(rows.view[rows.indices[0]], ring_of(x, 20, 4))


def test_no_tokens_at_all_leave_the_rings_alone(poisoned_rows):
    rows = poisoned_rows((4, CHANNELS), 2)
    before = rows.buffer.clone()
    x, weight, known = torch.empty(0, CHANNELS), torch.randn(CHANNELS, 4), torch.tensor([False, True])
    y = causal_conv1d_prefill(x, weight, None, rows.view, rows.indices, known, (0, 0), (0, 5))
    assert y.shape == (0, CHANNELS)
    assert torch.equal(rows.buffer, before)


def test_a_nan_sequence_does_not_reach_the_others():
    x, weight, new = torch.randn(30, CHANNELS), torch.randn(CHANNELS, 4), torch.tensor([False] * 3)
    lens, rings, clean_rings = (10, 2, 18), torch.empty(3, 4, CHANNELS), torch.empty(3, 4, CHANNELS)
    clean = causal_conv1d_prefill(x, weight, None, clean_rings, torch.arange(3), new, lens, (0, 0, 0))
    x[:10] = torch.nan
    y = causal_conv1d_prefill(x, weight, None, rings, torch.arange(3), new, lens, (0, 0, 0))
    assert torch.equal(y[10:], clean[10:])
    assert torch.equal(rings[1:], clean_rings[1:])
