"""The norms on the GPU (or interpreted) against their written-out forms in fp64."""

import pytest
import torch

from hybridserve.kernels.rms_norm import cpu, triton_norm, triton_norm_given
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference, rms_norm_reference
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
SHAPES = [(1, 64), (17, 40), (3, 5, 60), (2, 1024), (2, 3, 2, 16), (1, 5120)]
FULL_SHAPES = [(1000, 4096), (257, 5120), (99, 8192), (511, 32, 128), (3, 16384), (63, 16, 256)]


def shapes_of(device):
    return SHAPES + FULL_SHAPES if device.type == "cuda" else SHAPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(device, dtype, zero_centered):
    for shape in shapes_of(device):
        x = (torch.randn(shape, device=device) * 3).to(dtype)
        weight = torch.randn(shape[-1], device=device)
        with poisoned_memory():
            out = triton_norm.rms_norm(x, weight, 1e-6, zero_centered=zero_centered)
        truth = rms_norm_reference(x.double(), weight.double(), 1e-6, zero_centered=zero_centered)
        plain = cpu.rms_norm(x, weight, 1e-6, zero_centered=zero_centered)
        assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
        assert_as_good_as_plain(out, plain, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_residual(device, dtype):
    for shape in shapes_of(device):
        x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(shape[-1], device=device)
        with poisoned_memory():
            out, total = triton_norm.rms_norm_residual(x, residual, weight, 1e-6, zero_centered=False)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, triton_norm.rms_norm(total, weight, 1e-6, zero_centered=False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_gated(device, dtype):
    for shape in shapes_of(device):
        x, gate = ((torch.randn(shape, device=device) * s).to(dtype) for s in (3, 5))
        weight = torch.randn(shape[-1], device=device)
        with poisoned_memory():
            out = triton_norm.rms_norm_gated(x, gate, weight, 1e-6)
        truth = rms_norm_gated_reference(x.double(), gate.double(), weight.double(), 1e-6)
        assert_as_good_as_plain(out, cpu.rms_norm_gated(x, gate, weight, 1e-6), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_gated_of_some_channels(device, dtype):
    """Against the norm of whole rows; sums of squares come as columns of a wider tensor."""
    for tokens, heads, dim, own in (
        (3, 5, 60, slice(8, 30)),
        (2, 1, 256, slice(0, 128)),
        (1, 4, 32, slice(16, 32)),
    ):
        x, gate = ((torch.randn(tokens, heads, dim, device=device) * s).to(dtype) for s in (3, 5))
        weight = torch.randn(dim, device=device)
        with poisoned_memory():
            squares = triton_norm_given.sum_of_squares(x)
        torch.testing.assert_close(squares, x.float().square().sum(-1))
        every = torch.full((tokens, heads + 3), torch.nan, device=device)
        every[:, 2 : 2 + heads] = squares
        given = (x[..., own], gate[..., own], weight[own], 1e-6, every[:, 2 : 2 + heads], dim)
        with poisoned_memory():
            out = triton_norm_given.rms_norm_gated_given(*given)
        truth = rms_norm_gated_reference(x.double(), gate.double(), weight.double(), 1e-6)[..., own]
        assert out.is_contiguous() and out.dtype == dtype
        assert_as_good_as_plain(out, cpu.rms_norm_gated_given(*given), truth)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_tiny_and_large_rows(device, size):
    x, weight = torch.randn(5, 256, device=device) * size, torch.randn(256, device=device)
    x[2] = 0
    out = triton_norm.rms_norm(x, weight, 1e-6)
    truth = rms_norm_reference(x.double(), weight.double(), 1e-6)
    assert_as_good_as_plain(out, cpu.rms_norm(x, weight, 1e-6), truth)
    assert not out[2].any()


def test_rows_of_a_wider_tensor_are_read_where_they_lie(device):
    wide = torch.full((6, 200), float("nan"), device=device)
    wide[:, 16:144] = torch.randn(6, 128, device=device)
    part, weight = wide[:, 16:144], torch.randn(32, device=device)
    heads, x = part.view(6, 4, 32), torch.randn(6, 4, 32, device=device)
    assert not heads.is_contiguous()
    assert torch.equal(
        triton_norm.rms_norm(heads, weight, 1e-6), triton_norm.rms_norm(heads.clone(), weight, 1e-6)
    )
    gated = triton_norm.rms_norm_gated(x, heads, weight, 1e-6)
    assert torch.equal(gated, triton_norm.rms_norm_gated(x, heads.clone(), weight, 1e-6))
    whole = torch.ones(128, device=device)
    added = triton_norm.rms_norm_residual(part, x.view(6, 128), whole, 1e-6)
    assert torch.equal(added[1], part + x.view(6, 128))


def test_no_rows_are_no_launch(device):
    empty = torch.empty(0, 64, device=device)
    weight = torch.ones(64, device=device)
    assert triton_norm.rms_norm(empty, weight, 1e-6).shape == (0, 64)
    assert triton_norm.rms_norm_gated(empty, empty, weight, 1e-6).shape == (0, 64)


def test_rows_are_bitwise_their_own_in_any_batch(device):
    x, weight = torch.randn(37, 128, device=device), torch.randn(128, device=device)
    out = triton_norm.rms_norm(x, weight, 1e-6)
    order = torch.randperm(37, device=device)
    assert torch.equal(triton_norm.rms_norm(x[order], weight, 1e-6), out[order])
    assert torch.equal(triton_norm.rms_norm(x[5:6], weight, 1e-6), out[5:6])


def test_no_recompile_whatever_the_lengths(gpu, count_variants):
    weight = torch.randn(4096, device=gpu)
    kernels = triton_norm._rms_norm_kernel, triton_norm._rms_norm_gated_kernel

    def run(rows):
        x = torch.randn(rows, 4096, device=gpu, dtype=torch.bfloat16)
        triton_norm.rms_norm(x, weight, 1e-6)
        triton_norm.rms_norm_residual(x, x, weight, 1e-6)
        triton_norm.rms_norm_gated(x.view(rows, 32, 128), x.view(rows, 32, 128), weight[:128], 1e-6)

    run(7)
    before = count_variants(*kernels)
    for rows in (1, 2, 16, 63, 64, 1000, 4096):
        run(rows)
    assert count_variants(*kernels) == before


def test_rows_beyond_two_to_the_31_elements(gpu):
    x = torch.empty(2**31 // 4096 + 2, 4096, device=gpu, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 4096, device=gpu)
    weight = torch.randn(4096, device=gpu)
    out = triton_norm.rms_norm(x, weight, 1e-6)
    assert torch.equal(out[-3:], triton_norm.rms_norm(x[-3:], weight, 1e-6))
