"""Products of few tokens on the GPU (or interpreted) against their written-out forms in fp64."""

from dataclasses import replace

import pytest
import torch

from hybridserve.kernels.linear import choice, cpu, linear, linear_silu_and_mul, triton_gemv, triton_skinny
from hybridserve.kernels.linear.reference import linear_reference, linear_silu_and_mul_reference
from hybridserve.kernels.linear.triton_gemv import GemvTile
from hybridserve.kernels.linear.triton_skinny import SkinnyTile
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory, relative_error

ON_GPU = torch.cuda.is_available()
# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16] + [torch.bfloat16] * ON_GPU
# (rows, columns) of the weight: odd ones, below and above a tile
SHAPES = [(1, 16), (65, 40), (130, 300)] + [(1000, 4096), (333, 5120), (64, 12288)] * ON_GPU
GEMV = GemvTile() if ON_GPU else GemvTile(rows=4, columns=64)
SKINNY = SkinnyTile() if ON_GPU else SkinnyTile(columns=64)


def inputs(tokens, rows, columns, dtype, device):
    """x, weight, bias, residual; x and the residual are parts of wider tensors full of NaN."""
    x, residual = (torch.full((tokens, n + 24), float("nan"), device=device) for n in (columns, rows))
    x[:, 8:-16], residual[:, 8:-16] = torch.randn(tokens, columns), torch.randn(tokens, rows)
    weight = torch.randn(rows, columns, device=device) * columns**-0.5
    bias = torch.randn(rows, device=device)
    x, weight, bias, residual = (t.to(dtype) for t in (x, weight, bias, residual))
    return x[:, 8:-16], weight, bias, residual[:, 8:-16]


def run(kernel, x, weight, rows, **options):
    with poisoned_memory():
        out = torch.empty(x.shape[0], rows, dtype=options.pop("out_dtype", x.dtype), device=x.device)
    kernel(x, weight, out, **options)
    return out


def kernels_for(tokens):
    """(kernel, options) of every form that takes so many tokens."""
    forms = [(triton_skinny.skinny, {"tile": replace(SKINNY, parts=parts)}) for parts in (1, 2, 3)]
    return forms + [(triton_gemv.gemv, {"tile": GEMV})] * (tokens == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_product(device, dtype, tokens):
    for rows, columns in SHAPES:
        x, weight, bias, residual = inputs(tokens, rows, columns, dtype, device)
        for added in ({}, {"bias": bias, "residual": residual}):
            wide = {name: tensor.double() for name, tensor in added.items()}
            truth = linear_reference(x.double(), weight.double(), **wide)
            for kernel, options in kernels_for(tokens):
                out = run(kernel, x, weight, rows, **added, **options)
                assert_as_good_as_plain(out, cpu.linear(x, weight, **added), truth)


@pytest.mark.parametrize("tokens", [1, 9])
def test_sums_leave_in_fp32(device, tokens):
    x, weight, _, _ = inputs(tokens, 65, 300, torch.float16, device)
    truth = linear_reference(x.double(), weight.double())
    for kernel, options in kernels_for(tokens):
        out = run(kernel, x, weight, 65, out_dtype=torch.float32, **options)
        # far from what one rounding to the dtype of the input would leave
        assert relative_error(out, truth) < torch.finfo(x.dtype).eps / 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_gate(device, dtype, tokens):
    for rows, columns in SHAPES:
        x, weight, _, _ = inputs(tokens, 2 * rows, columns, dtype, device)
        truth = linear_silu_and_mul_reference(x.double(), weight.double())
        plain = cpu.linear_silu_and_mul(x, weight)
        for kernel, options in kernels_for(tokens):
            if getattr(options["tile"], "parts", 1) == 1:
                out = run(kernel, x, weight, rows, gated=True, **options)
                assert_as_good_as_plain(out, plain, truth)


def test_a_row_depends_on_no_other_row(device):
    x, weight, bias, residual = inputs(5, 130, 300, torch.float16, device)
    others = x.clone()
    others[:2], others[3:] = float("nan"), 7
    for kernel, options in kernels_for(5):
        first, second = (
            run(kernel, t, weight, 130, bias=bias, residual=residual, **options) for t in (x, others)
        )
        assert torch.equal(first[2], second[2])
        assert torch.equal(first, run(kernel, x, weight, 130, bias=bias, residual=residual, **options))


def test_parts_beyond_the_columns_are_empty(device):
    x, weight, _, _ = inputs(2, 10, 40, torch.float16, device)
    out = run(triton_skinny.skinny, x, weight, 10, tile=replace(SKINNY, parts=4))
    truth = linear_reference(x.double(), weight.double())
    assert_as_good_as_plain(out, cpu.linear(x, weight), truth)


def test_no_tokens(device):
    x, weight, _, _ = inputs(0, 10, 40, torch.float16, device)
    assert run(triton_skinny.skinny, x, weight, 10).shape == (0, 10)


def test_parts_cover_the_machine_and_no_more():
    assert choice.skinny_tile(4096, 12288).parts == 4
    assert choice.skinny_tile(4096, 4096).parts == 2
    assert choice.skinny_tile(5120, 17408).parts == 2
    assert choice.skinny_tile(12352, 4096).parts == 1


def test_dispatch(gpu):
    for tokens in (1, 2, 32, 33):
        x, weight, _, residual = inputs(tokens, 1024, 4096, torch.bfloat16, gpu)
        truth = linear_reference(x.double(), weight.double(), None, residual.double())
        plain = cpu.linear(x, weight, None, residual)
        assert choice.takes_triton(x, weight) == (tokens <= 32)
        assert_as_good_as_plain(linear(x, weight, residual=residual, dependent=True), plain, truth)
        gated = linear_silu_and_mul_reference(x.double(), weight.double())
        out = linear_silu_and_mul(x, weight, dependent=True)
        assert_as_good_as_plain(out, cpu.linear_silu_and_mul(x, weight), gated)
    assert not choice.takes_triton(x[:8, :4000], weight[:, :4000])
    assert not choice.takes_triton(x[:8].float(), weight.float())


def test_a_chain_of_dependent_launches_in_a_graph(gpu):
    """Each product reads what the one ahead writes, while that one may still be running."""
    weights = [torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16) / 64 for _ in range(8)]
    gates = [torch.randn(8192, 4096, device=gpu, dtype=torch.bfloat16) / 64 for _ in range(8)]
    torch.cuda.synchronize()

    def chain(x, **how):
        for weight, gate in zip(weights, gates, strict=True):
            x = linear(linear_silu_and_mul(x, gate, **how), weight, None, x, **how)
        return x

    for tokens, read_ahead in ((1, False), (8, False), (8, True), (32, True)):
        x = torch.randn(tokens, 4096, device=gpu, dtype=torch.bfloat16)
        plain = chain(x)
        how = {"dependent": True, "read_ahead": read_ahead}
        chain(x, **how)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, **how)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, plain)


@pytest.mark.parametrize(("rows", "columns"), [(130, 300), (64, 5120), (1000, 4096)])
def test_reading_ahead_changes_no_bit(gpu, rows, columns):
    """Whether tiles end within the weight or beyond: at its last row, where a part of K has no columns."""
    for parts in (1, 4):
        x, weight, _, _ = inputs(5, rows, columns, torch.bfloat16, gpu)
        how = {"tile": replace(SKINNY, parts=parts), "dependent": True}
        plain = run(triton_skinny.skinny, x, weight, rows, **how)
        assert torch.equal(run(triton_skinny.skinny, x, weight, rows, **how, read_ahead=True), plain)
        if parts == 1:
            gate = torch.cat([weight, weight])
            plain = run(triton_skinny.skinny, x, gate, rows, gated=True, **how)
            ahead = run(triton_skinny.skinny, x, gate, rows, gated=True, **how, read_ahead=True)
            assert torch.equal(ahead, plain)


def test_other_numbers_of_tokens_compile_nothing(gpu, count_variants):
    _, weight, _, _ = inputs(1, 1024, 4096, torch.bfloat16, gpu)
    kernels = triton_gemv._gemv_kernel, triton_skinny._skinny_kernel
    for tokens in (1, 2, 17):
        linear(torch.randn(tokens, 4096, device=gpu, dtype=torch.bfloat16), weight)
    before = count_variants(*kernels)
    for tokens in range(1, 33):
        linear(torch.randn(tokens, 4096, device=gpu, dtype=torch.bfloat16), weight)
    assert count_variants(*kernels) == before
