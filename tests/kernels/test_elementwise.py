"""Norms, rotary embedding and activations against their written-out forms in fp64."""

import pytest
import torch

from hybridserve.kernels.activation import silu_and_mul
from hybridserve.kernels.activation.reference import silu_and_mul_reference
from hybridserve.kernels.rms_norm import rms_norm, rms_norm_gated, rms_norm_gated_given, sum_of_squares
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference, rms_norm_reference
from hybridserve.kernels.rotary import apply_rotary, rotary_cos_sin
from hybridserve.kernels.rotary.reference import rotary_reference

SHAPES = [(0, 8), (1, 64), (17, 40), (3, 5, 60)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(shape, zero_centered, assert_accurate):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    exact, plain = (
        rms_norm_reference(x.to(t), weight.to(t), 1e-6, zero_centered=zero_centered)
        for t in (torch.float64, torch.float32)
    )
    assert_accurate(rms_norm(x, weight, 1e-6, zero_centered=zero_centered), exact, plain)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_gated(shape, assert_accurate):
    x, gate, weight = torch.randn(shape) * 3, torch.randn(shape) * 5, torch.randn(shape[-1])
    exact, plain = (
        rms_norm_gated_reference(x.to(t), gate.to(t), weight.to(t), 1e-6)
        for t in (torch.float64, torch.float32)
    )
    assert_accurate(rms_norm_gated(x, gate, weight, 1e-6), exact, plain)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_gated_of_some_channels(shape, assert_accurate):
    """The sums of squares of both halves give each its part of the whole norm."""
    x, gate, weight = torch.randn(shape) * 3, torch.randn(shape) * 5, torch.randn(shape[-1])
    half = shape[-1] // 2
    squares = sum_of_squares(x[..., :half]) + sum_of_squares(x[..., half:])
    exact, plain = (
        rms_norm_gated_reference(x.to(t), gate.to(t), weight.to(t), 1e-6)
        for t in (torch.float64, torch.float32)
    )
    for own in (slice(0, half), slice(half, None)):
        out = rms_norm_gated_given(x[..., own], gate[..., own], weight[own], 1e-6, squares, shape[-1])
        assert_accurate(out, exact[..., own], plain[..., own])


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul(shape, assert_accurate):
    x = torch.randn(shape) * 5
    exact, plain = (silu_and_mul_reference(x.to(t)) for t in (torch.float64, torch.float32))
    assert_accurate(silu_and_mul(x), exact, plain)


def test_bfloat16_is_computed_in_fp32_and_rounded_once():
    x, gate, weight = torch.randn(9, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.float(), gate.float(), weight.float()
    pairs = [
        (rms_norm(x, weight, 1e-6), rms_norm(wide[0], wide[2], 1e-6)),
        (rms_norm_gated(x, gate, weight, 1e-6), rms_norm_gated(*wide, 1e-6)),
        (silu_and_mul(x), silu_and_mul(wide[0])),
    ]
    for narrow, full in pairs:
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, full.bfloat16())


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (64, 16), (40, 20), (40, 0)])
def test_rotary(dim, rotary_dim):
    x, positions = torch.randn(6, 3, dim), torch.tensor([0, 1, 2, 17, 500, 3000])
    out = apply_rotary(x, *rotary_cos_sin(positions, rotary_dim, 10000.0))
    exact = rotary_reference(x.double(), positions, rotary_dim, 10000.0)
    # an fp32 angle of 3000 radians is known to 3000 * 2 ** -23
    assert (out.double() - exact).abs().max() <= 3000 * 2**-23 * x.abs().max()
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_rotary_bfloat16_is_rounded_once():
    x, positions = torch.randn(6, 3, 64).bfloat16(), torch.arange(6)
    angles = rotary_cos_sin(positions, 32, 10000.0)
    assert torch.equal(apply_rotary(x, *angles), apply_rotary(x.float(), *angles).bfloat16())
