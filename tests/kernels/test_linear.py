"""Products with a weight on the CPU: plain PyTorch's results, and clear errors."""

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.linear import linear, linear_silu_and_mul
from hybridserve.kernels.linear.reference import linear_reference, linear_silu_and_mul_reference


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_linear(tokens):
    x, weight, bias, residual = random(tokens, 7), random(3, 7), random(3), random(tokens, 3)
    before = residual.clone()
    for b in (None, bias):
        for r in (None, residual):
            torch.testing.assert_close(linear(x, weight, b, r), linear_reference(x, weight, b, r))
    assert torch.equal(residual, before)
    torch.testing.assert_close(
        linear(x, weight, residual=residual, consume_residual=True), linear_reference(x, weight, None, before)
    )


def test_linear_writes_fp32_where_told():
    x, weight = random(4, 40, dtype=torch.bfloat16), random(6, 40, dtype=torch.bfloat16)
    out = torch.full((4, 6), float("nan"))
    assert linear(x, weight, out_dtype=torch.float32, out=out) is out
    assert torch.equal(out, F.linear(x, weight).float())
    assert torch.equal(linear(x, weight, out_dtype=torch.float32), out)
    narrow = torch.empty(4, 6, dtype=torch.bfloat16)
    assert torch.equal(linear(x, weight, out=narrow), F.linear(x, weight))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_linear_silu_and_mul(tokens):
    x, weight = random(tokens, 7, dtype=torch.float32), random(6, 7, dtype=torch.float32)
    truth = linear_silu_and_mul_reference(x.double(), weight.double())
    torch.testing.assert_close(linear_silu_and_mul(x, weight).double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": random(2, 5)}, r"x \(2, 5\) and weight \(4, 6\)"),
        ({"bias": random(3)}, r"bias must have shape \(4,\), got \(3,\)"),
        ({"residual": random(1, 4)}, r"residual must have shape \(2, 4\), got \(1, 4\)"),
        ({"out": random(2, 3)}, r"out must have shape \(2, 4\), got \(2, 3\)"),
        ({"out": random(2, 4).float()}, r"out must be torch.float64, got torch.float32"),
        ({"out_dtype": torch.float16}, r"out_dtype must be .*torch.float64.* got torch.float16"),
        ({"out_dtype": torch.float32, "bias": random(4)}, "neither bias nor residual"),
        ({"out": random(2, 4), "residual": random(2, 4)}, "neither bias nor residual"),
    ],
)
def test_bad_input(change, named):
    with pytest.raises(ValueError, match=named):
        linear(**{"x": random(2, 6), "weight": random(4, 6), **change})


def test_gate_without_its_up_projection():
    with pytest.raises(ValueError, match="got 3 rows"):
        linear_silu_and_mul(random(2, 6), random(3, 6))
