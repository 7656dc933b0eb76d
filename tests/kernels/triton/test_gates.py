"""Gates on the GPU (or interpreted): of MLPs, of attention outputs, of Gated DeltaNet."""

import pytest
import torch

from hybridserve.kernels.activation import cpu, triton_gates
from hybridserve.kernels.activation.reference import sigmoid_and_mul_reference, silu_and_mul_reference
from hybridserve.kernels.linear_attention import cpu as linear_cpu
from hybridserve.kernels.linear_attention import triton_gdn_gates
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
SHAPES = [(1, 64), (17, 40), (3, 2500)]
FULL_SHAPES = [(1000, 24576), (129, 34816), (255, 4096)]


def shapes_of(device):
    return SHAPES + FULL_SHAPES if device.type == "cuda" else SHAPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(device, dtype):
    for shape in shapes_of(device):
        x = (torch.randn(shape, device=device) * 5).to(dtype)
        with poisoned_memory():
            out = triton_gates.silu_and_mul(x)
        assert_as_good_as_plain(out, cpu.silu_and_mul(x), silu_and_mul_reference(x.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_and_mul(device, dtype):
    for tokens, width in shapes_of(device):
        wide = (torch.randn(tokens, 2 * width, device=device) * 5).to(dtype)
        x, gate = torch.randn(tokens, width, device=device).to(dtype), wide[:, width:]
        with poisoned_memory():
            out = triton_gates.sigmoid_and_mul(x, gate)
        truth = sigmoid_and_mul_reference(x.double(), gate.double())
        assert_as_good_as_plain(out, cpu.sigmoid_and_mul(x, gate), truth)


def test_extreme_gates_are_finite(device):
    gate = torch.tensor([[-1e4, -200.0, -89.0, 0.0, 89.0, 1e4]], device=device)
    up = torch.ones_like(gate)
    out = triton_gates.silu_and_mul(torch.cat((gate, up), 1))
    assert torch.allclose(out, torch.tensor([[0.0, 0, 0, 0, 89, 1e4]], device=device))
    out = triton_gates.sigmoid_and_mul(up, gate)
    assert torch.allclose(out, torch.tensor([[0.0, 0, 0, 0.5, 1, 1]], device=device))


def test_no_tokens_are_no_launch(device):
    empty = torch.empty(0, 64, device=device)
    assert triton_gates.silu_and_mul(empty).shape == (0, 32)
    per_head = torch.ones(64, device=device)
    assert triton_gdn_gates.gdn_gates(empty, empty, per_head, per_head)[0].shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads"), [(5, 6), (100, 32), (3, 48)])
def test_gdn_gates(device, dtype, tokens, heads):
    wide = (torch.randn(tokens, 3 * heads, device=device) * 4).to(dtype)
    a, b = wide[:, :heads], wide[:, heads : 2 * heads]
    A_log, dt_bias = torch.randn(heads, device=device), torch.randn(heads, device=device)
    with poisoned_memory():
        g, beta = triton_gdn_gates.gdn_gates(a, b, A_log, dt_bias)
    plain = linear_cpu.gdn_gates(a, b, A_log, dt_bias)
    z = a.double() + dt_bias.double()
    softplus = z.clamp(min=0) + (-z.abs()).exp().log1p()
    assert g.dtype == beta.dtype == torch.float32
    assert_as_good_as_plain(g, plain[0], -A_log.double().exp() * softplus)
    assert_as_good_as_plain(beta, plain[1], b.double().sigmoid())


def test_gdn_gates_of_heads_that_almost_never_decay(device):
    a = torch.linspace(-60, -1, 64, device=device)[None]
    zero = torch.zeros(64, device=device)
    g, _ = triton_gdn_gates.gdn_gates(a, a, zero, zero)
    truth = -a.double().exp().log1p()
    assert ((g.double() - truth).abs() <= 1e-5 * truth.abs()).all()


def test_rows_are_bitwise_their_own_in_any_batch(device):
    x = torch.randn(37, 96, device=device)
    order = torch.randperm(37, device=device)
    out = triton_gates.silu_and_mul(x)
    assert torch.equal(triton_gates.silu_and_mul(x[order]), out[order])
    assert torch.equal(triton_gates.silu_and_mul(x[5:6]), out[5:6])
    a, b, A_log = x[:, :32], x[:, 32:64], x[0, 64:]
    gates = triton_gdn_gates.gdn_gates(a, b, A_log, A_log)
    for rows in (order, slice(5, 6)):
        assert torch.equal(triton_gdn_gates.gdn_gates(a[rows], b[rows], A_log, A_log), gates[:, rows])


def test_gdn_gates_into_given_memory(device):
    a, b = torch.randn(2, 37, 6, device=device)
    per_head = torch.randn(6, device=device)
    room = torch.full((2, 40, 6), float("nan"), device=device)
    expected = triton_gdn_gates.gdn_gates(a, b, per_head, per_head)
    out = torch.full_like(expected, float("nan"))
    assert triton_gdn_gates.gdn_gates(a, b, per_head, per_head, out) is out and torch.equal(out, expected)
    plain = torch.full_like(expected, float("nan"))
    assert linear_cpu.gdn_gates(a, b, per_head, per_head, plain) is plain
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-6)
    for wrong in (room[:, :37], out[:1], out.double()):
        with pytest.raises(AssertionError):
            triton_gdn_gates.gdn_gates(a, b, per_head, per_head, wrong)


def test_no_recompile_whatever_the_lengths(gpu, count_variants):
    A_log = torch.randn(32, device=gpu)

    def run(tokens):
        x = torch.randn(tokens, 4096, device=gpu)
        triton_gates.silu_and_mul(x)
        triton_gates.sigmoid_and_mul(x, x)
        triton_gdn_gates.gdn_gates(x[:, :32], x[:, 32:64], A_log, A_log)

    kernels = triton_gates._gate_kernel, triton_gdn_gates._gdn_gates_kernel
    run(7)
    before = count_variants(*kernels)
    for tokens in (1, 2, 16, 63, 64, 1000, 4096):
        run(tokens)
    assert count_variants(*kernels) == before


def test_rows_beyond_two_to_the_31_elements(gpu):
    x = torch.empty(2**31 // 8192 + 2, 8192, device=gpu, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 8192, device=gpu)
    assert torch.equal(triton_gates.silu_and_mul(x)[-3:], triton_gates.silu_and_mul(x[-3:]))
