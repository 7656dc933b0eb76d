"""Linear attention's decode in Triton: outputs and states against fp64, and against plain PyTorch's error."""

from collections.abc import Callable

import pytest
import torch

from hybridserve.kernels.linear_attention import cpu
from hybridserve.kernels.linear_attention.reference import linear_attention_reference
from hybridserve.kernels.linear_attention.triton_decode import _decode_kernel, linear_attention_decode
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

Tensors = tuple[torch.Tensor | None, ...]


def make_inputs(
    device, batch, heads=(2, 4), dims=(32, 32), decay="head", beta=True, dtype=torch.float32
) -> Tensors:
    """q, k, v, g, beta; q, k and v are views of one projection."""
    (k_heads, v_heads), (k_dim, v_dim) = heads, dims
    sizes = (k_heads * k_dim, k_heads * k_dim, v_heads * v_dim)
    q, k, v = torch.randn(batch, sum(sizes), device=device).to(dtype).split(sizes, 1)
    g = -torch.rand(batch, v_heads, *([k_dim] if decay == "channel" else []), device=device) * 2
    return (
        q.unflatten(1, (k_heads, k_dim)),
        k.unflatten(1, (k_heads, k_dim)),
        v.unflatten(1, (v_heads, v_dim)),
        None if decay == "none" else g,
        torch.rand(batch, v_heads, device=device) if beta else None,
    )


def references(inputs: Tensors, states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Outputs and final states of every row by the recurrence in `dtype`."""
    rows = [
        linear_attention_reference(
            *(None if x is None else x[i : i + 1].to(dtype) for x in inputs), states[i].to(dtype)
        )
        for i in range(states.shape[0])
    ]
    return torch.cat([out for out, _ in rows]), torch.stack([state for _, state in rows])


def check(inputs: Tensors, rows, initial: torch.Tensor) -> None:
    """Run on rows of a poisoned arena beside one row of padding, and compare."""
    batch = initial.shape[0]
    index = rows.indices[:batch]
    rows.view[index] = initial
    before = rows.buffer.clone()
    padded = tuple(None if x is None else torch.cat((x, torch.full_like(x[:1], torch.nan))) for x in inputs)
    with poisoned_memory():
        out = linear_attention_decode(*padded, rows.view, torch.cat((index, torch.full_like(index[:1], -1))))
    assert rows.untouched(before, index)
    assert not out[batch].any()
    exact, exact_state = references(inputs, initial, torch.float64)
    plain_state = initial.clone()
    plain = cpu.linear_attention_decode(*inputs, plain_state, torch.arange(batch))
    assert_as_good_as_plain(out[:batch], plain, exact)
    assert_as_good_as_plain(rows.view[index], plain_state, exact_state)


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("decay", ["head", "channel", "none"])
@pytest.mark.parametrize(("heads", "dims"), [((2, 4), (32, 32)), ((1, 3), (48, 40)), ((2, 2), (64, 96))])
def test_families(device, device_rows: Callable, heads, dims, decay, beta):
    inputs = make_inputs(device, 2, heads, dims, decay, beta)
    rows = device_rows((heads[1], dims[1], dims[0]), 3)
    check(inputs, rows, torch.randn(2, heads[1], dims[1], dims[0], device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs(device, device_rows, dtype):
    initial = torch.randn(2, 4, 32, 32, device=device)
    check(make_inputs(device, 2, dtype=dtype), device_rows((4, 32, 32), 3), initial)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("g", [-20.0, 0.0])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e4])
def test_extremes(device, device_rows, size, g, beta):
    q, k, v, gs, betas = make_inputs(device, 1)
    inputs = (q * size, k * size, v * size, torch.full_like(gs, g), torch.full_like(betas, beta))
    check(inputs, device_rows((4, 32, 32), 2), torch.randn(1, 4, 32, 32, device=device))


def test_bf16_states(device):
    inputs = make_inputs(device, 2)
    state = torch.randn(2, 4, 32, 32, device=device).bfloat16()
    exact, exact_state = references(inputs, state, torch.float64)
    fp32 = state.float()
    plain = cpu.linear_attention_decode(*inputs, fp32, torch.arange(2))
    out = linear_attention_decode(*inputs, state, torch.arange(2, device=device))
    assert_as_good_as_plain(out, plain, exact)
    assert_as_good_as_plain(state, fp32.bfloat16(), exact_state)


def test_rows_are_bitwise_their_own_in_any_batch(device):
    inputs = make_inputs(device, 4)
    initial = torch.randn(4, 4, 32, 32, device=device)
    state, permuted = initial.clone(), initial.clone()
    out = linear_attention_decode(*inputs, state, torch.arange(4, device=device))
    order = torch.tensor([2, 0, 3, 1], device=device)
    again = linear_attention_decode(*(x[order] for x in inputs), permuted, order)
    assert torch.equal(again, out[order]) and torch.equal(permuted, state)


@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (96, 192)])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_full_shapes(gpu, device_rows, dims, decay):
    inputs = make_inputs(gpu, 5, (4, 8), dims, decay, dtype=torch.bfloat16)
    check(inputs, device_rows((8, dims[1], dims[0]), 6), torch.randn(5, 8, dims[1], dims[0], device=gpu))


def test_states_behind_two_to_the_31_elements(gpu):
    inputs = make_inputs(gpu, 2)
    flat = torch.empty(12 << 30, dtype=torch.uint8, device=gpu).view(torch.float32)
    rows = flat.as_strided(((flat.numel() - 4096) // 64, 4, 32, 32), (64, 1024, 32, 1))
    index = torch.tensor([rows.shape[0] - 1, rows.shape[0] - 100], device=gpu)
    assert index.min() * 64 > 2**31
    rows[index] = initial = torch.randn(2, 4, 32, 32, device=gpu)
    near = initial.clone()
    out = linear_attention_decode(*inputs, rows, index)
    assert torch.equal(out, linear_attention_decode(*inputs, near, torch.arange(2, device=gpu)))
    assert torch.equal(rows[index], near)


def test_no_variant_is_compiled_for_another_batch(gpu, count_variants):
    state = torch.randn(64, 4, 32, 32, device=gpu)
    counts = set()
    for batch in (2, 1, 16, 33, 64):
        linear_attention_decode(*make_inputs(gpu, batch), state, torch.arange(batch, device=gpu))
        counts.add(count_variants(_decode_kernel))
    assert len(counts) == 1
