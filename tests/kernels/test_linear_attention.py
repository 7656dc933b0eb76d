"""Linear attention: both fast forms against the recurrence in fp64, on poisoned overlapping rows."""

from dataclasses import dataclass, replace
from inspect import unwrap

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybridserve.kernels.linear_attention import (
    gdn_gates,
    linear_attention_decode,
    linear_attention_prefill,
)
from hybridserve.kernels.linear_attention.chunkwise import unit_lower_inverse
from hybridserve.kernels.linear_attention.reference import gdn_gates_reference, linear_attention_reference

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1000)
RAGGED = (5, 0, 130, 64, 1, 0, 63, 2)


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None

    def tokens(self, start: int, end: int) -> "Inputs":
        return Inputs(*(None if x is None else x[start:end] for x in self.fields()))

    def rows(self, order: torch.Tensor) -> "Inputs":
        return Inputs(*(None if x is None else x[order] for x in self.fields()))

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(None if x is None else x.to(dtype) for x in self.fields()))

    def fields(self) -> tuple[torch.Tensor | None, ...]:
        return self.q, self.k, self.v, self.g, self.beta


def make_inputs(
    tokens: int,
    k_heads: int = 2,
    v_heads: int = 4,
    k_dim: int = 32,
    v_dim: int = 16,
    decay: str = "head",
    beta=True,
) -> Inputs:
    channels = {"head": (), "channel": (k_dim,)}
    g = None if decay == "none" else -torch.rand(tokens, v_heads, *channels[decay]).mul_(3).exp_().mul_(0.05)
    return Inputs(
        torch.randn(tokens, k_heads, k_dim),
        torch.randn(tokens, k_heads, k_dim),
        torch.randn(tokens, v_heads, v_dim),
        g,
        torch.rand(tokens, v_heads) if beta else None,
    )


def check_prefill(inputs: Inputs, query_lens, poisoned_rows, assert_accurate, **options) -> None:
    count, (v_heads, v_dim), k_dim = len(query_lens), inputs.v.shape[1:], inputs.k.shape[-1]
    rows = poisoned_rows((v_heads, v_dim, k_dim), count + 1)
    indices = rows.indices[:count]
    has_initial_state = torch.arange(count) % 2 == 1
    initial = torch.randn(count, v_heads, v_dim, k_dim) * has_initial_state[:, None, None, None]
    rows.view[indices[has_initial_state]] = initial[has_initial_state]
    before = rows.buffer.clone()
    out = linear_attention_prefill(
        *inputs.fields(), rows.view, indices, has_initial_state, query_lens, **options
    )
    written = torch.tensor([n > 0 for n in query_lens])
    assert rows.untouched(before, indices[written])

    start, results = 0, {torch.float64: [], torch.float32: []}
    for s, length in enumerate(query_lens):
        part = inputs.tokens(start, start + length)
        for dtype, collected in results.items():
            collected.append(
                linear_attention_reference(*part.to(dtype).fields(), initial[s].to(dtype), **options)
            )
        start += length
    exact, plain = results[torch.float64], results[torch.float32]
    assert_accurate(out, torch.cat([r[0] for r in exact]), torch.cat([r[0] for r in plain]), 16)
    for s, length in enumerate(query_lens):
        if length:
            assert_accurate(rows.view[indices[s]], exact[s][1], plain[s][1], 16)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_lengths(length, poisoned_rows, assert_accurate):
    check_prefill(make_inputs(length), (length,), poisoned_rows, assert_accurate)


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("decay", ["head", "channel", "none"])
@pytest.mark.parametrize(("k_heads", "v_heads"), [(4, 4), (2, 4), (1, 4)])
def test_prefill_families(k_heads, v_heads, decay, beta, poisoned_rows, assert_accurate):
    inputs = make_inputs(sum(RAGGED), k_heads, v_heads, 48, 40, decay, beta)
    check_prefill(inputs, RAGGED, poisoned_rows, assert_accurate)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("g", [-20.0, -100.0, 0.0])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_prefill_extreme_gates(decay, g, beta, poisoned_rows, assert_accurate):
    inputs = make_inputs(200, decay=decay)
    inputs = replace(inputs, g=torch.full_like(inputs.g, g), beta=torch.full_like(inputs.beta, beta))
    check_prefill(inputs, (130, 70), poisoned_rows, assert_accurate)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_prefill_weak_decay_after_strong(decay, poisoned_rows, assert_accurate):
    inputs = make_inputs(256, decay=decay)
    g = torch.where(torch.rand_like(inputs.g) < 0.3, -100.0, -1e-3)
    check_prefill(replace(inputs, g=g), (256,), poisoned_rows, assert_accurate)


def test_prefill_decay_of_minus_infinity_forgets():
    inputs = make_inputs(70)
    inputs.g[66] = -torch.inf
    state = torch.zeros(1, 4, 16, 32)
    index, new = torch.tensor([0]), torch.tensor([False])
    out = linear_attention_prefill(*inputs.fields(), state, index, new, (70,))
    fresh = torch.zeros(1, 4, 16, 32)
    tail = linear_attention_prefill(*inputs.tokens(66, 70).fields(), fresh, index, new, (4,))
    assert torch.allclose(out[66:], tail, atol=1e-6)
    assert torch.allclose(state, fresh, atol=1e-6)


def test_prefill_alike_keys_do_not_cancel(poisoned_rows, assert_accurate):
    inputs = make_inputs(128, decay="none")
    inputs = replace(
        inputs, k=inputs.k[:1].expand_as(inputs.k).contiguous(), beta=torch.ones_like(inputs.beta)
    )
    check_prefill(inputs, (128,), poisoned_rows, assert_accurate)


def test_prefill_without_norm_and_with_scale(poisoned_rows, assert_accurate):
    inputs = make_inputs(100)
    inputs = replace(inputs, k=inputs.k * 0.1)
    check_prefill(inputs, (100,), poisoned_rows, assert_accurate, scale=0.3, qk_l2norm=False)


@pytest.mark.parametrize("decay", ["head", "channel", "none"])
def test_prefill_cut_anywhere_equals_whole(decay, assert_accurate):
    length = 97
    inputs = make_inputs(length, decay=decay)
    index, new, going_on = torch.tensor([0]), torch.tensor([False]), torch.tensor([True])
    whole_state = torch.full((1, 4, 16, 32), torch.nan)
    whole = linear_attention_prefill(*inputs.fields(), whole_state, index, new, (length,))
    exact, exact_state = linear_attention_reference(
        *inputs.to(torch.float64).fields(), torch.zeros(4, 16, 32, dtype=torch.float64)
    )
    for cut in range(1, length):
        state = torch.full((1, 4, 16, 32), torch.nan)
        first = linear_attention_prefill(*inputs.tokens(0, cut).fields(), state, index, new, (cut,))
        rest = inputs.tokens(cut, length)
        second = linear_attention_prefill(*rest.fields(), state, index, going_on, (length - cut,))
        assert_accurate(torch.cat((first, second)), exact, whole, 16)
        assert_accurate(state[0], exact_state, whole_state[0], 16)


def test_prefill_cut_at_a_chunk_is_bitwise_the_whole():
    inputs = make_inputs(200)
    index, new, going_on = torch.tensor([0]), torch.tensor([False]), torch.tensor([True])
    whole_state, state = torch.empty(1, 4, 16, 32), torch.empty(1, 4, 16, 32)
    whole = linear_attention_prefill(*inputs.fields(), whole_state, index, new, (200,))
    first = linear_attention_prefill(*inputs.tokens(0, 128).fields(), state, index, new, (128,))
    second = linear_attention_prefill(*inputs.tokens(128, 200).fields(), state, index, going_on, (72,))
    assert torch.equal(torch.cat((first, second)), whole)
    assert torch.equal(state, whole_state)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_prefill_of_a_sequence_is_bitwise_the_same_in_any_batch(decay):
    lens = (70, 5, 200)
    inputs = make_inputs(sum(lens), decay=decay)
    new = torch.tensor([False] * 3)
    together_state = torch.empty(3, 4, 16, 32)
    together = linear_attention_prefill(*inputs.fields(), together_state, torch.arange(3), new, lens)
    start = 0
    for s, length in enumerate(lens):
        part, state = inputs.tokens(start, start + length), torch.empty(1, 4, 16, 32)
        alone = linear_attention_prefill(*part.fields(), state, torch.tensor([0]), new[:1], (length,))
        assert torch.equal(alone, together[start : start + length])
        assert torch.equal(state[0], together_state[s])
        start += length


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("decay", ["head", "channel", "none"])
@pytest.mark.parametrize(("k_heads", "v_heads"), [(4, 4), (2, 4), (1, 4)])
def test_decode_families(k_heads, v_heads, decay, beta, batch, poisoned_rows, assert_accurate):
    inputs = make_inputs(batch, k_heads, v_heads, 48, 40, decay, beta)
    rows = poisoned_rows((v_heads, 40, 48), batch + 2)
    indices = rows.indices[:batch]
    initial = torch.randn(batch, v_heads, 40, 48)
    rows.view[indices] = initial
    before = rows.buffer.clone()
    out = linear_attention_decode(*inputs.fields(), rows.view, indices)
    assert rows.untouched(before, indices)
    for b in range(batch):
        exact, plain = (
            linear_attention_reference(*inputs.tokens(b, b + 1).to(dtype).fields(), initial[b].to(dtype))
            for dtype in (torch.float64, torch.float32)
        )
        assert_accurate(out[b : b + 1], exact[0], plain[0], 16)
        assert_accurate(rows.view[indices[b]], exact[1], plain[1], 16)


@pytest.mark.parametrize("decay", ["head", "channel", "none"])
def test_decode_rows_are_bitwise_their_own_in_any_batch(decay):
    inputs = make_inputs(16, decay=decay)
    initial = torch.randn(16, 4, 16, 32)
    state = initial.clone()
    out = linear_attention_decode(*inputs.fields(), state, torch.arange(16))
    order = torch.randperm(16)
    permuted = initial.clone()
    out_permuted = linear_attention_decode(*inputs.rows(order).fields(), permuted, order)
    assert torch.equal(out_permuted, out[order])
    assert torch.equal(permuted, state)
    for b in range(16):
        alone = initial.clone()
        out_alone = linear_attention_decode(*inputs.tokens(b, b + 1).fields(), alone, torch.tensor([b]))
        assert torch.equal(out_alone[0], out[b])
        assert torch.equal(alone[b], state[b])


def test_decode_goes_on_from_prefill(assert_accurate):
    inputs = make_inputs(80)
    state, index = torch.empty(1, 4, 16, 32), torch.tensor([0])
    outs = [
        linear_attention_prefill(*inputs.tokens(0, 70).fields(), state, index, torch.tensor([False]), (70,))
    ]
    for t in range(70, 80):
        outs.append(linear_attention_decode(*inputs.tokens(t, t + 1).fields(), state, index))
    exact, plain = (
        linear_attention_reference(*inputs.to(dtype).fields(), torch.zeros(4, 16, 32, dtype=dtype))
        for dtype in (torch.float64, torch.float32)
    )
    assert_accurate(torch.cat(outs), exact[0], plain[0], 16)
    assert_accurate(state[0], exact[1], plain[1], 16)


def test_bf16_states_are_read_as_they_are_and_written_rounded():
    inputs = make_inputs(75)
    before = torch.randn(2, 4, 16, 32).bfloat16()
    index, known = torch.tensor([1]), torch.tensor([True])
    narrow, wide = before.clone(), before.float()
    outs = [linear_attention_prefill(*inputs.fields(), x, index, known, (75,)) for x in (narrow, wide)]
    assert torch.equal(*outs)
    assert torch.equal(narrow[1], wide[1].bfloat16()) and torch.equal(narrow[0], before[0])
    wide = narrow.float()
    outs = [linear_attention_decode(*inputs.tokens(3, 4).fields(), x, index) for x in (narrow, wide)]
    assert torch.equal(*outs)
    assert torch.equal(narrow[1], wide[1].bfloat16()) and torch.equal(narrow[0], before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_give_the_rounded_fp32_result(dtype):
    inputs = make_inputs(70).to(dtype)
    inputs = replace(inputs, g=inputs.g.float(), beta=inputs.beta.float())
    index, new = torch.tensor([0]), torch.tensor([False])
    state, state_fp32 = torch.empty(1, 4, 16, 32), torch.empty(1, 4, 16, 32)
    out = linear_attention_prefill(*inputs.fields(), state, index, new, (70,))
    out_fp32 = linear_attention_prefill(*inputs.to(torch.float32).fields(), state_fp32, index, new, (70,))
    assert out.dtype == dtype
    assert torch.equal(out, out_fp32.to(dtype))
    assert torch.equal(state, state_fp32)


def test_gdn_gates(assert_accurate):
    a, b = torch.randn(50, 4) * 30, torch.randn(50, 4) * 10
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    exact, plain = (
        gdn_gates_reference(*(x.to(dtype) for x in (a, b, A_log, dt_bias)))
        for dtype in (torch.float64, torch.float32)
    )
    for actual, e, p in zip(gdn_gates(a, b, A_log, dt_bias), exact, plain, strict=True):
        assert actual.dtype == torch.float32
        assert_accurate(actual, e, p)
    g, beta = gdn_gates(a.bfloat16(), b.bfloat16(), A_log, dt_bias)
    assert g.dtype == beta.dtype == torch.float32


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64])
def test_unit_lower_inverse(size):
    a = torch.randn(3, 2, size, size).tril_(-1) * 0.2
    product = (torch.eye(size) + a).double() @ unit_lower_inverse(a).double()
    assert torch.allclose(product, torch.eye(size, dtype=torch.float64).expand_as(product), atol=1e-5)


@pytest.mark.parametrize(("k_heads", "v_heads"), [(4, 4), (2, 4), (1, 4)])
def test_agrees_with_transformers(k_heads, v_heads, assert_accurate):
    # its plain functions: as decorated, they are replaced where fla-core is installed
    torch_chunk_gated_delta_rule = unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    torch_recurrent_gated_delta_rule = unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    inputs = make_inputs(150, k_heads, v_heads)
    batch = [x.unsqueeze(0) for x in inputs.fields()]
    # not every version repeats the key heads by itself
    batch[:2] = (x.repeat_interleave(v_heads // k_heads, dim=2) for x in batch[:2])
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state, index = torch.empty(1, v_heads, 16, 32), torch.tensor([0])
    out = linear_attention_prefill(*inputs.fields(), state, index, torch.tensor([False]), (150,))
    chunked, chunked_state = torch_chunk_gated_delta_rule(*batch, **options)
    exact, exact_state = linear_attention_reference(
        *inputs.to(torch.float64).fields(), torch.zeros(v_heads, 16, 32, dtype=torch.float64)
    )
    assert_accurate(out, exact, chunked[0])
    assert_accurate(state[0], exact_state, chunked_state[0].transpose(-1, -2))

    recurrent, recurrent_state = torch_recurrent_gated_delta_rule(
        *[x[:, :1] for x in batch], initial_state=chunked_state, **options
    )
    decoded = linear_attention_decode(*inputs.tokens(0, 1).fields(), state, index)
    assert torch.allclose(decoded, recurrent[0], atol=1e-5)
    assert torch.allclose(state[0], recurrent_state[0].transpose(-1, -2), atol=1e-5)


def test_no_tokens_at_all_leave_the_states_alone(poisoned_rows):
    rows = poisoned_rows((4, 16, 32), 2)
    before = rows.buffer.clone()
    known = torch.tensor([False, True])
    out = linear_attention_prefill(*make_inputs(0).fields(), rows.view, rows.indices, known, (0, 0))
    assert out.shape == (0, 4, 16)
    assert torch.equal(rows.buffer, before)


def test_a_nan_sequence_does_not_reach_the_others():
    lens = (70, 30, 5)
    inputs = make_inputs(sum(lens))
    new, clean_state, state = torch.tensor([False] * 3), torch.empty(3, 4, 16, 32), torch.empty(3, 4, 16, 32)
    clean = linear_attention_prefill(*inputs.fields(), clean_state, torch.arange(3), new, lens)
    inputs.v[:70], inputs.k[:70] = torch.nan, torch.nan
    out = linear_attention_prefill(*inputs.fields(), state, torch.arange(3), new, lens)
    assert torch.equal(out[70:], clean[70:])
    assert torch.equal(state[1:], clean_state[1:])


@pytest.mark.parametrize("tokens", [1, 5])
def test_slices_of_one_projection_are_taken_as_they_are(tokens):
    inputs = make_inputs(tokens)
    mixed = torch.cat([x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)], 1)
    q, k, v = mixed.split([x[0].numel() for x in (inputs.q, inputs.k, inputs.v)], 1)
    gates = torch.stack((inputs.g, inputs.beta), -1)
    sliced = Inputs(
        q.unflatten(1, (2, 32)),
        k.unflatten(1, (2, 32)),
        v.unflatten(1, (4, 16)),
        gates[..., 0],
        gates[..., 1],
    )
    results = []
    for given in (inputs, sliced):
        state, indices = torch.ones(tokens, 4, 16, 32), torch.arange(tokens)
        decoded = linear_attention_decode(*given.fields(), state, indices)
        known = torch.tensor([True])
        prefilled = linear_attention_prefill(*given.fields(), state, indices[:1], known, (tokens,))
        results.append((decoded, prefilled, state))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
