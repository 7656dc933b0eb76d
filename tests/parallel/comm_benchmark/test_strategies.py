"""Strategies on ranks that are threads, against the layer written out with the operators' references."""

import pytest
import torch

from hybridserve.kernels.linear_attention.reference import gdn_gates_reference, linear_attention_reference
from hybridserve.parallel.comm_benchmark.mixer import CONTEXT, LayerWeights, Mixer, random_weights, whole
from hybridserve.parallel.comm_benchmark.settings import Case, LayerShape
from hybridserve.parallel.comm_benchmark.shares import state_of
from hybridserve.parallel.comm_benchmark.strategies import (
    STRATEGIES,
    GatherState,
    ValueHeads,
    ValueHeadsInParts,
)

CPU = torch.device("cpu")
CASES = [Case("decode", 1), Case("decode", 5), Case("prefill", 70)]


def layer_reference(
    shape: LayerShape, weights: LayerWeights, x: torch.Tensor, history: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in fp64: x [T, hidden], the convolution's inputs before it [kernel - 1, C], its state."""
    w = {name: value.double() for name, value in vars(weights).items()}
    projected = x.double() @ w["in_proj"].T
    heads = shape.num_v_heads
    qkv, z, b, a = projected.split([shape.conv_dim, shape.value_dim, heads, heads], -1)
    inputs = torch.cat([history.double(), qkv])
    windows = inputs.unfold(0, shape.conv_kernel, 1)
    qkv = torch.nn.functional.silu((windows * w["conv"]).sum(-1))
    q, k, v = qkv.split([shape.key_dim, shape.key_dim, shape.value_dim], -1)
    q, k = (part.unflatten(1, (-1, shape.head_k_dim)) for part in (q, k))
    g, beta = gdn_gates_reference(a, b, w["a_log"], w["dt_bias"])
    out, state = linear_attention_reference(q, k, v.unflatten(1, (heads, -1)), g, beta, state.double())
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + shape.eps) * w["norm"]
    return (normed.flatten(1) * torch.nn.functional.silu(z)) @ w["out_proj"].T, state


def inputs(shape: LayerShape, case: Case) -> torch.Tensor:
    return torch.randn(case.tokens, shape.hidden_size, generator=torch.Generator().manual_seed(3))


def expected_of(shape: LayerShape, weights: LayerWeights, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    mixer = Mixer(shape, whole(shape), weights, case)
    # the ring's column p % kernel holds the input of position p
    columns = [(CONTEXT - lag) % shape.conv_kernel for lag in range(shape.conv_kernel - 1, 0, -1)]
    x = inputs(shape, case)
    per_sequence = [
        layer_reference(shape, weights, rows, mixer.conv_state[i][columns], mixer.state[i])
        for i, rows in enumerate(x.split(case.tokens // case.sequences))
    ]
    return torch.cat([y for y, _ in per_sequence]), torch.stack([s for _, s in per_sequence])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("make", STRATEGIES, ids=lambda make: make.name)
def test_every_rank_has_the_layers_output_and_its_states(make, size, case, shape, on_threads) -> None:
    weights = random_weights(shape, torch.float32, CPU, seed=1)
    expected, states = expected_of(shape, weights, case)
    assert make.unavailable(shape, size, on_gpu=False) is None

    def program(rank, wire):
        strategy = make(shape, weights, case, rank, size)
        x = inputs(shape, case)
        streams = strategy.step((torch.ones_like(x), x), wire)
        return streams, *strategy.kept_state()

    for (output, normed), part, state in on_threads(size, program):
        torch.testing.assert_close(output.double(), 1 + expected, rtol=1e-4, atol=1e-5)
        scale = ((1 + expected).square().mean(-1, keepdim=True) + shape.eps).rsqrt()
        torch.testing.assert_close(
            normed.double(), (1 + expected) * scale * weights.next_norm, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(state.double(), state_of(states, part), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_messages(case, shape, on_threads) -> None:
    """What each strategy sends, by the formulas; only one of them sends states."""
    weights = random_weights(shape, torch.float32, CPU, seed=1)
    tokens, hidden = case.tokens, 4 * shape.hidden_size
    expected = {
        "value_heads": {"hidden": tokens * hidden},
        "head_v_dim": {"hidden": tokens * hidden, "norm": tokens * 4 * shape.num_v_heads},
        "gather_projections": {"hidden": tokens * hidden, "projections": tokens * 4 * shape.projected_width},
    }
    expected["value_heads_in_parts"] = expected["value_heads"]
    expected["gather_state"] = {
        **expected["gather_projections"],
        "state": case.sequences * shape.state_bytes,
    }
    for make in STRATEGIES:

        def program(rank, wire, make=make):
            x = inputs(shape, case)
            make(shape, weights, case, rank, 2).step((x, x), wire)
            return wire.sent

        assert on_threads(2, program) == [expected[make.name]] * 2, make.name


def test_steps_go_on_from_each_other(shape, on_threads) -> None:
    """A second step with the state that was kept: gathered states equal split ones."""
    weights = random_weights(shape, torch.float32, CPU, seed=1)
    case = Case("decode", 3)

    def program(rank, wire):
        strategies = [make(shape, weights, case, rank, 2) for make in (ValueHeads, GatherState)]
        for _ in range(2):
            x = inputs(shape, case)
            outputs = [strategy.step((x, x), wire) for strategy in strategies]
        return outputs

    for split, gathered in on_threads(2, program):
        torch.testing.assert_close(split, gathered, rtol=1e-4, atol=1e-5)


def test_a_chain_of_layers_in_parts_is_the_same_chain(shape, on_threads) -> None:
    weights = random_weights(shape, torch.float32, CPU, seed=1)
    case = Case("prefill", 70)

    def program(rank, wire):
        x = inputs(shape, case)
        kinds = (ValueHeads, ValueHeadsInParts)
        chains = [[make(shape, weights, case, rank, 2) for _ in range(3)] for make in kinds]
        return [make.run(layers, (x, x), wire) for make, layers in zip(kinds, chains, strict=True)]

    for plain, in_parts in on_threads(2, program):
        torch.testing.assert_close(in_parts, plain, rtol=1e-4, atol=1e-5)


def test_decode_in_one_launch_is_the_same_layer(shape) -> None:
    weights = random_weights(shape, torch.float32, CPU, seed=1)
    case = Case("decode", 5)
    projected = inputs(shape, case) @ weights.in_proj.T
    fused, composed = (Mixer(shape, whole(shape), weights, case, fused=fused) for fused in (True, False))
    torch.testing.assert_close(fused.mix(projected), composed.mix(projected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.state, composed.state, rtol=1e-5, atol=1e-6)


def test_sizes_that_do_not_work_say_so(shape) -> None:
    reasons = {make.name: make.unavailable(shape, 3, on_gpu=False) for make in STRATEGIES}
    assert reasons["value_heads"] == "3 ranks do not divide num_v_heads 8; these do: 1, 2, 4, 8"
    assert "head_v_dim 16" in reasons["head_v_dim"]
    assert "hidden_size 32" in reasons["gather_projections"] and "hidden_size 32" in reasons["gather_state"]
    by_dim = {make.name: make.unavailable(shape, 16, on_gpu=False) for make in STRATEGIES}
    assert by_dim["value_heads"] is not None and by_dim["head_v_dim"] is None
    gpu = {make.name: make.unavailable(shape, 2, on_gpu=True) for make in STRATEGIES}
    assert (
        gpu["head_v_dim"] == "head_v_dim 16 / 2 is less than the 16 its kernels take"
        and gpu["value_heads"] is None
    )
