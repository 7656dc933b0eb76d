"""Mixture of experts on the CPU against the loop over tokens."""

import pytest
import torch

from hybridserve.kernels.moe import moe_experts, moe_route
from hybridserve.kernels.moe.reference import moe_experts_reference, moe_route_reference


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 3), (16, 16)])
def test_route(experts, top_k, normalize):
    logits = torch.randn(9, experts + 4) * 3
    weights, ids = moe_route(logits, experts, top_k, normalize=normalize)
    exact, exact_ids = moe_route_reference(logits.double(), experts, top_k, normalize=normalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids, exact_ids)
    assert torch.allclose(weights.double(), exact, rtol=1e-5)
    if normalize:
        assert torch.allclose(weights[:, :-1].sum(1), torch.ones(9))


def test_equal_logits_go_to_the_lower_ids():
    _, ids = moe_route(torch.zeros(2, 9), 8, 3, normalize=True)
    assert ids.tolist() == [[0, 1, 2, 8]] * 2


def test_route_of_padding():
    logits = torch.randn(4, 9)
    logits[1] = float("nan")
    weights, ids = moe_route(logits, 8, 3, normalize=True, row_index=torch.tensor([5, -1, 0, -1]))
    whole = moe_route(logits, 8, 3, normalize=True)
    assert torch.equal(ids[[0, 2]], whole[1][[0, 2]]) and torch.equal(weights[[0, 2]], whole[0][[0, 2]])
    assert (ids[[1, 3]] == -1).all() and (weights[[1, 3]] == 0).all()


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "size"), [(0, 4, 8), (1, 4, 8), (23, 40, 17)])
def test_experts(tokens, experts, size, with_residual, assert_accurate):
    """Fewer choices than experts, choices of none, a token without any."""
    x, w13, w2 = torch.randn(tokens, 24), torch.randn(experts, 2 * size, 24), torch.randn(experts, 24, size)
    weights, ids = torch.rand(tokens, 3), torch.randint(-1, experts, (tokens, 3), dtype=torch.int32)
    ids[:1] = -1
    residual = torch.randn(tokens, 24) if with_residual else None
    out = moe_experts(x, w13, w2, weights, ids, residual)
    exact, plain = (
        moe_experts_reference(*(a.to(t) for a in (x, w13, w2, weights)), ids, residual_in(residual, t))
        for t in (torch.float64, torch.float32)
    )
    assert_accurate(out, exact, plain)


def residual_in(residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if residual is None else residual.to(dtype)
