"""Routing and experts on the GPU (or interpreted), in both forms, against fp64 and against themselves."""

from functools import partial

import pytest
import torch

from hybridserve.kernels.moe import cpu, triton_experts, triton_grouped, triton_sort
from hybridserve.kernels.moe.reference import moe_experts_reference, moe_route_reference
from hybridserve.kernels.moe.triton_direct import moe_experts_direct
from hybridserve.kernels.moe.triton_grouped import Config, moe_experts_grouped
from hybridserve.kernels.moe.triton_route import moe_route
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
# of the interpreter: (tokens, experts, slots, hidden, intermediate); odd sizes are masked everywhere
SHAPES = [(1, 5, 3, 64, 16), (2, 9, 4, 40, 11)]
GROUPED_SHAPES = [(19, 7, 3, 40, 36)]
FULL_SHAPES = [(1, 513, 11, 2048, 512), (7, 257, 9, 2048, 512), (3, 33, 5, 1000, 360)]
FULL_GROUPED = [(33, 513, 11, 2048, 512), (500, 33, 5, 1000, 360), (300, 17, 9, 2048, 512)]
# inner blocks are halved for fp32, and a product's is 16 at least
TINY_TILES = Config(16, up=(16, 32, 4, 2), down=(16, 32, 4, 2))
TINY_HALVES = Config(32, up=(16, 32, 4, 2), down=(16, 32, 4, 2), halves=True, tma=True)
CONFIGS = [triton_grouped.STREAM, triton_grouped.MIDDLE, triton_grouped.DENSE]


def make(device, dtype, tokens, experts, slots, hidden, size):
    """x is cut out of a wider tensor; the choices are as a router's, the last expert always chosen."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    w13 = (torch.randn(experts, 2 * size, hidden, device=device) / hidden**0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, size, device=device) / size**0.5).to(dtype)
    logits = torch.randn(tokens, experts, device=device)
    weights, ids = cpu.moe_route(logits, experts - 1, slots - 1, normalize=True)
    return x, w13, w2, weights, ids, torch.randn(tokens, hidden, device=device).to(dtype)


def check(form, x, w13, w2, weights, ids, residual, **options):
    with poisoned_memory():
        out = form(x, w13, w2, weights, ids, residual, **options)
    plain = cpu.moe_experts(x, w13, w2, weights, ids, residual)
    # all experts' weights in fp64 would be 13 GB
    wide = None if residual is None else residual.double()
    truth = moe_experts_reference(x.double(), w13, w2, weights.double(), ids, wide)
    assert_as_good_as_plain(out, plain, truth)
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_route(device, dtype, normalize):
    for tokens, experts, top_k in [(3, 5, 3), (2, 16, 16), (4, 100, 10), (2, 512, 10), (2, 700, 8)]:
        logits = (torch.randn(tokens, experts + 7, device=device) * 3).to(dtype)
        with poisoned_memory():
            weights, ids = moe_route(logits, experts, top_k, normalize=normalize)
        plain, plain_ids = cpu.moe_route(logits, experts, top_k, normalize=normalize)
        truth, truth_ids = moe_route_reference(logits.double(), experts, top_k, normalize=normalize)
        assert torch.equal(ids, truth_ids) and torch.equal(ids, plain_ids)
        assert_as_good_as_plain(weights, plain, truth)


def test_route_of_special_values(device):
    """Ties go to the lower id, zeros of both signs are equal, infinities and NaN give ids of experts."""
    inf, nan = float("inf"), float("nan")
    rows = [[0.0] * 9, [-0.0, 0.0] * 4 + [0.0], [-inf] * 8 + [0.0], [nan] * 9, [-1.0, -2.0] * 4 + [80.0]]
    logits = torch.tensor(rows, device=device)
    weights, ids = moe_route(logits, 8, 3, normalize=True)
    assert ids.tolist()[:2] == [[0, 1, 2, 8]] * 2 and ids.tolist()[4] == [0, 2, 4, 8]
    assert ((ids >= 0) & (ids <= 8)).all() and (ids[:, -1] == 8).all()
    assert weights[3].isnan().all() and weights[4, 3] == 1
    assert torch.allclose(weights[:2], torch.tensor([1 / 3] * 3 + [0.5], device=device))


def test_route_of_padding(device):
    logits = torch.randn(4, 9, device=device)
    logits[1] = float("nan")
    row_index = torch.tensor([5, -1, 0, -1], device=device)
    weights, ids = moe_route(logits, 8, 3, normalize=True, row_index=row_index)
    whole = moe_route(logits, 8, 3, normalize=True)
    assert torch.equal(ids[[0, 2]], whole[1][[0, 2]]) and torch.equal(weights[[0, 2]], whole[0][[0, 2]])
    assert (ids[[1, 3]] == -1).all() and (weights[[1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direct(device, dtype):
    for shape in SHAPES + FULL_SHAPES * (device.type == "cuda"):
        *inputs, residual = make(device, dtype, *shape)
        check(moe_experts_direct, *inputs, residual)
        check(moe_experts_direct, *inputs, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped(device, dtype):
    """Several tiles an expert, half tiles, and experts of none; tensor descriptors where sizes are even."""
    check(moe_experts_grouped, *make(device, dtype, 24, 5, 2, 64, 32), config=TINY_HALVES)
    for shape in GROUPED_SHAPES:
        *inputs, residual = make(device, dtype, *shape)
        check(moe_experts_grouped, *inputs, residual, config=TINY_TILES)
        check(moe_experts_grouped, *inputs, None, config=TINY_TILES)
    if device.type == "cuda":
        for shape in FULL_GROUPED:
            inputs = make(device, dtype, *shape)
            for config in [triton_grouped.EXACT] if dtype == torch.float32 else CONFIGS:
                check(moe_experts_grouped, *inputs, config=config)


@pytest.mark.parametrize("form", [moe_experts_direct, moe_experts_grouped])
def test_uneven_choices(device, form):
    """One expert takes all; every token the same; padded rows; slots of none; nobody at all."""
    options = {"config": TINY_TILES} if form is moe_experts_grouped else {}
    x, w13, w2, weights, ids, residual = make(device, torch.float32, 5, 6, 3, 24, 5)
    # what no choice names may be anything
    w13[4], w2[4] = float("nan"), float("nan")
    for choices in ([3, -1, -1], [0, 5, 2], [-1, -1, -1]):
        ids[:] = torch.tensor(choices, dtype=torch.int32, device=device)
        check(form, x, w13, w2, weights, ids, residual, **options)
    ids[:] = torch.tensor([[0, 1, 5], [-1] * 3, [2, 0, 5], [-1] * 3, [5, -1, 3]], device=device)
    x[1] = float("nan")
    out = form(x, w13, w2, weights, ids, residual, **options)
    assert torch.equal(out[[1, 3]], residual[[1, 3]])
    kept = [0, 2, 4]
    check(form, x[kept], w13, w2, weights[kept], ids[kept], residual[kept], **options)


@pytest.mark.parametrize("form", [moe_experts_direct, moe_experts_grouped])
def test_a_permuted_batch_gives_the_same_bits(device, form):
    options = {"config": TINY_TILES} if form is moe_experts_grouped else {}
    count = 4 if form is moe_experts_direct else 18
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w13, w2, weights, ids, residual = make(device, dtype, count, 6, 3, 40, 6 if count == 4 else 36)
    out = form(x, w13, w2, weights, ids, residual, **options)
    order = torch.randperm(count, device=device)
    moved = form(x[order], w13, w2, weights[order], ids[order], residual[order], **options)
    # interpreted products are a BLAS's, where the order of additions depends on a row's place
    exact = device.type == "cuda" or form is moe_experts_direct
    same = torch.equal if exact else partial(torch.allclose, rtol=1e-5, atol=1e-5)
    assert same(moved, out[order])
    padded = [torch.cat([a, a[:3]]) for a in (x, weights, ids, residual)]
    padded[2][count:] = -1
    more = form(padded[0], w13, w2, *padded[1:], **options)
    assert same(more[:count], out) and torch.equal(more[count:], residual[:3])


def test_sort(device):
    """Every choice lies in exactly one tile of its expert."""
    ids = torch.randint(-1, 9, (50, 3), dtype=torch.int32, device=device)
    ids[ids == 4] = 2
    with poisoned_memory():
        tiles = triton_sort.sort_by_expert(ids, 9, 4)
    flat, seen = ids.flatten().tolist(), []
    count = tiles.num_tiles.item()
    assert count == sum(-(-flat.count(e) // 4) for e in range(9)) <= tiles.max_tiles
    for tile in range(count):
        start, rows = tiles.starts[tile].item(), tiles.rows[tile].item()
        assert 0 < rows <= 4
        for choice in tiles.choices[start : start + rows].tolist():
            assert flat[choice] == tiles.experts[tile].item()
            seen.append(choice)
    assert sorted(seen) == [at for at, e in enumerate(flat) if e >= 0]


def test_sort_when_all_choices_are_of_one_expert_or_none(device):
    for value, expected in ((3, 10), (-1, 0)):
        ids = torch.full((20, 2), value, dtype=torch.int32, device=device)
        assert triton_sort.sort_by_expert(ids, 9, 4).num_tiles.item() == expected


def test_the_form_follows_the_tokens(device, monkeypatch):
    used = []
    for name in ("moe_experts_direct", "moe_experts_grouped"):
        monkeypatch.setattr(triton_experts, name, lambda x, *_, name=name: used.append(name) or x)
    for tokens in (0, 1, 8, 9):
        inputs = make(device, torch.float32, tokens, 3, 2, 16, 16)
        assert triton_experts.moe_experts(*inputs).shape == (tokens, 16)
    assert used == ["moe_experts_direct"] * 2 + ["moe_experts_grouped"]


def test_a_graph_holds_both_forms(gpu):
    """Captured once, replayed on other choices: nothing waits for the host, and nothing keeps old counts."""
    for tokens in (4, 40):
        x, w13, w2, _, _, residual = make(gpu, torch.bfloat16, tokens, 33, 5, 256, 128)
        logits = torch.randn(tokens, 48, device=gpu)

        def block(x=x, w13=w13, w2=w2, residual=residual, logits=logits):
            weights, ids = moe_route(logits, 32, 4, normalize=True)
            return triton_experts.moe_experts(x, w13, w2, weights, ids, residual)

        block()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = block()
        for _ in range(3):
            logits.normal_()
            graph.replay()
            assert torch.equal(out, block())


def test_variants_do_not_follow_the_tokens(gpu, count_variants):
    kernels = [getattr(m, n) for m in (triton_sort, triton_grouped) for n in vars(m) if n.endswith("_kernel")]
    before = None
    for tokens in (16, 17, 33, 50, 51):
        moe_experts_grouped(*make(gpu, torch.bfloat16, tokens, 33, 3, 256, 128), config=TINY_TILES)
        before = before or count_variants(*kernels)
        assert count_variants(*kernels) == before
