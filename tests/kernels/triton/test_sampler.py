"""The Triton sampler against the CPU path: every filter, every path, ties, broken rows, padded rows."""

import pytest
import torch
import triton
import triton.language as tl

from hybridserve.kernels.sampler import cpu, draw_key
from hybridserve.kernels.sampler import triton_sample as module
from hybridserve.kernels.sampler.random import FIRST, GOLDEN, MASK, SECOND, gumbel_noise
from hybridserve.kernels.sampler.triton_greedy import greedy
from hybridserve.kernels.sampler.triton_logprobs import token_logprobs
from hybridserve.kernels.sampler.triton_math import least_exponential, noise_of
from hybridserve.kernels.sampler.triton_penalties import bias_batch, penalize_batch
from hybridserve.kernels.sampler.triton_sample import SERVED, Tuning, sample, sample_seeded
from hybridserve.kernels.testing import poisoned_memory

# small enough that a thousand logits take every path: many chunks, narrowing, ranking
SMALL = Tuning(chunk=256, gathered=256, sample=256, bins=64, candidates=256, ranked=16, tile=256)
# nothing fits what is gathered, so that whole rows are scanned
SCANNING = Tuning(chunk=256, gathered=512, programs=2, sample=256, bins=64, candidates=2, ranked=16, tile=512)
NAMES = ("temperature", "top_k", "top_p", "min_p")


def options(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every mix of filters on and off, a greedy row now and then."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return {
        "temperature": choose([0.0, 0.2, 0.7, 1.0, 1.0, 5.0]),
        "top_k": choose([0, -1, 1, 2, 40, 300, 10**6]),
        "top_p": choose([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]),
        "min_p": choose([0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
        "keys": torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
    }


def same_options(count: int, **given: float) -> dict[str, torch.Tensor]:
    """Equal rows, but for the noise."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    tensors = {name: torch.full((count,), value) for name, value in values.items()}
    return tensors | {"keys": torch.tensor([draw_key(seed, 5) for seed in range(count)])}


def on(device: torch.device, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def assert_agrees(logits: torch.Tensor, given: dict[str, torch.Tensor], tuning: Tuning) -> None:
    """The plain path's tokens, with the boundary of top_p or min_p within 1e-6 of where it is.

    It runs where the logits lie: of long rows a CPU would take a minute.
    """
    given = on(logits.device, given)
    tokens, finite = sample(logits, **given, tuning=tuning)
    assert bool(finite.all())
    near = torch.zeros_like(finite)
    for step in (-1e-6, 0, 1e-6):
        moved = {name: given[name].double() * (1 + step) for name in ("top_p", "min_p")}
        moved["top_p"][given["top_p"] >= 1] = 1.0
        moved["min_p"][given["min_p"] >= 1] = 1.0
        near |= cpu.sample(logits.float(), **(given | moved)) == tokens
    wrong = [(b, [given[n][b].item() for n in NAMES]) for b in (~near).nonzero().squeeze(1).tolist()]
    assert not wrong


@triton.jit
def _store_noise(key, noise, bound, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    tl.store(noise + ids, noise_of(tl.load(key).to(tl.uint64), ids))
    tl.store(bound + ids, least_exponential(tl.load(key).to(tl.uint64), ids))


def unmixed(z: int) -> int:
    """What the finaliser of SplitMix64 makes `z` of."""
    for shift, factor in ((31, SECOND), (27, FIRST), (30, 1)):
        z ^= (z >> shift) ^ (z >> 2 * shift)
        z = z * pow(factor, -1, 2**64) & MASK
    return z


def test_noise_is_the_references(device):
    """Of ordinary numbers, and of the smallest, very small and largest ones that can be drawn."""
    drawn = [0, 1 << 11, 12345 << 11, 1 << 40, 1 << 58, 1 << 63, MASK - (1 << 45), MASK]
    keys = [draw_key(3, 9) & MASK] + [(unmixed(z) - GOLDEN) & MASK for z in drawn]
    for key in keys:
        noise, bound = torch.empty(2, 512, device=device)
        signed = key - 2**64 if key >> 63 else key
        _store_noise[(1,)](torch.tensor([signed], device=device), noise, bound, 512)
        expected = torch.tensor([gumbel_noise(key, i) for i in range(512)])
        error = (noise.cpu() - expected).abs()
        # rounding a number near 1 to fp32 moves its noise, which is negative then and hardly ever the largest
        assert bool((error <= torch.where(expected > 0, 2e-6, 1e-4)).all())
        exponential = expected.double().neg().exp()
        assert bool((bound.cpu() <= exponential * 1.00001).all())
        # near it where a token may win, but for the 32 bits that are looked at
        near = (exponential > 2**-24) & (exponential < 0.4)
        assert bool((bound.cpu() >= exponential * 0.99)[near].all())


@pytest.mark.parametrize("filters", [{}, {"top_k": 600}, {"top_p": 0.99999}])
def test_nearly_equal_scores_are_told_apart(device, filters):
    """A bound of the noise leaves many tokens then: logits that undo the noise, but for one token."""
    given = same_options(3, **filters)
    noise = torch.tensor([[gumbel_noise(k & MASK, i) for i in range(700)] for k in given["keys"].tolist()])
    logits = -noise
    winners = torch.tensor([5, 300, 699])
    logits[torch.arange(3), winners] += 1e-3
    tokens, _ = sample(logits.to(device), **on(device, given), tuning=SMALL)
    expected = cpu.sample(logits, **given)
    assert torch.equal(tokens.cpu(), expected)
    if not filters:
        assert torch.equal(expected, winners)


@pytest.mark.parametrize("tuning", [SMALL, SCANNING], ids=["gathered", "scanned"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_agrees_with_the_cpu_path(device, spread, tuning):
    rows = 96 if device.type == "cuda" else 6
    assert_agrees((torch.randn(rows, 701) * spread).to(device), options(rows), tuning)


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257])
def test_agrees_on_small_vocabularies(device, vocab):
    assert_agrees(torch.randn(4, vocab).to(device), options(4, vocab), SMALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_agrees_on_half_precision_rows_with_a_stride(device, dtype):
    logits = torch.randn(5, 900).to(device, dtype)[:, :701]
    assert_agrees(logits, options(5, 1), SMALL)


@pytest.mark.parametrize("tuning", [SMALL, SCANNING], ids=["gathered", "scanned"])
def test_agrees_on_equal_logits(device, tuning):
    """Most of a row may hold one number, far more of it than can be gathered or ranked."""
    logits = torch.randint(0, 8, (5, 701)).float().to(device)
    given = options(5, 2)
    given["temperature"] = given["temperature"].clamp(min=0.5)
    assert_agrees(logits, given, tuning)


def test_agrees_with_the_sizes_that_are_served(device):
    """Pivots from a sample of a long row, whatever its shape; on a CPU one row of each."""
    count, vocab = (96, 248320) if device.type == "cuda" else (1, 9000)
    zipf = -1.3 * torch.arange(1, vocab + 1).log()
    peaked = torch.stack([zipf[torch.randperm(vocab)] for _ in range(count)]) + 12
    given = options(count) if count > 1 else same_options(1, temperature=0.7, top_p=0.9)
    for logits in (torch.randn(count, vocab) * 1.3, peaked):
        assert_agrees(logits.to(device), given, SERVED)


@pytest.mark.parametrize("heavy", [0.0, 7.0, 7.5])
def test_pivots_leave_few_tokens_about_the_boundary(device, heavy):
    """Also where one token is a third of the sample's mass, and a far smaller share of the row's.

    Were the boundary not between two pivots, or too much between them, the row would be scanned repeatedly.
    """
    vocab, count, candidates = 60000, 4, 8192
    logits = torch.randn(count, vocab) * 1.3
    logits[:, 5] = torch.maximum(logits[:, 5], torch.tensor(heavy))
    given = on(device, same_options(count, temperature=0.7, top_p=0.9))
    pivots = torch.zeros(count, module.PIVOTS_PADDED, device=device)
    module.choose_pivots[(count,)](
        logits.to(device),
        vocab,
        vocab,
        *(given[name] for name in NAMES),
        pivots,
        SAMPLE=4096,
        BINS=512,
        CANDIDATES=candidates,
        PADDED=module.PIVOTS_PADDED,
    )
    for row, found in zip(logits, pivots.cpu(), strict=True):
        ranked = row.sort(descending=True).values
        weights = ((ranked - ranked[0]).double() / 0.7).exp()
        boundary = ranked[((weights.cumsum(0) - weights) < 0.9 * weights.sum()).sum() - 1]
        inside, outside = found[found >= boundary], found[found < boundary]
        assert len(inside)
        assert len(outside)
        assert int(((row > outside.max()) & (row <= inside.min())).sum()) <= candidates


@pytest.mark.parametrize("vocab", [1000, 8192, 50257, 248320])
def test_agrees_at_every_vocabulary(gpu, vocab):
    for spread in (0.01, 1.0, 8.0):
        logits = (torch.randn(96, vocab) * spread).to(gpu)
        assert_agrees(logits, options(96, vocab), SERVED)
        # as bf16 arithmetic leaves them: many equal
        assert_agrees(logits.bfloat16().float(), options(96, vocab + 1), SERVED)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_draws_from_the_distribution(device, filters):
    count = 20000 if device.type == "cuda" else 8
    row = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, -3.0e38, 3.0])
    given = same_options(count, **filters)
    tokens, finite = sample(row.expand(count, -1).to(device), **on(device, given), tuning=SMALL)
    probability, order = row.softmax(0).sort(descending=True)
    keep = torch.arange(7) < filters.get("top_k", 7)
    keep &= (probability.cumsum(0) - probability < filters.get("top_p", 1.0) + 1e-6) & (
        probability >= filters.get("min_p", 0.0) * probability[0]
    )
    expected = torch.zeros(7)
    expected[order] = probability * keep
    expected /= expected.sum()
    frequency = torch.bincount(tokens.cpu(), minlength=7) / count
    assert bool(finite.all())
    # four standard deviations of a share, and nothing where nothing may be drawn
    assert bool(((frequency - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all())


@pytest.mark.parametrize("tuning", [SMALL, SCANNING], ids=["gathered", "scanned"])
def test_rows_are_their_own_in_any_batch(device, tuning):
    logits, given = (torch.randn(4, 701) * 2).to(device), on(device, options(4, 3))
    tokens, _ = sample(logits, **given, tuning=tuning)
    order = torch.randperm(4).to(device)
    permuted, _ = sample(logits[order], **{n: x[order] for n, x in given.items()}, tuning=tuning)
    assert torch.equal(permuted, tokens[order])
    alone, _ = sample(logits[3:4], **{n: x[3:4] for n, x in given.items()}, tuning=tuning)
    assert torch.equal(alone, tokens[3:4])
    with poisoned_memory():
        again, _ = sample(logits, **given, tuning=tuning)
    assert torch.equal(again, tokens)


def test_seeds_are_hashed_as_on_the_host(device):
    """In rows without filters and with one."""
    seeds = [0, 1, 2**63 - 1, -(2**63), -1, 12345]
    positions = [0, 2**40, 7, 1, 131072, 3]
    # with equal logits every bit of the noise counts
    logits, given = torch.zeros(6, 300, device=device), same_options(6)
    given["top_k"][3:] = 250
    given["keys"] = torch.tensor([draw_key(s, p) for s, p in zip(seeds, positions, strict=True)])
    expected, _ = sample(logits, **on(device, given), tuning=SMALL)
    del given["keys"]
    hashed = {"seeds": torch.tensor(seeds), "positions": torch.tensor(positions)}
    tokens, _ = sample_seeded(logits, **on(device, given | hashed), tuning=SMALL)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("tuning", [SMALL, SCANNING], ids=["gathered", "scanned"])
def test_equal_logits_at_the_boundary_are_kept_by_rising_id(device, tuning):
    """Five above, and of 900 equal ones, zeros of either sign, the seven lowest ids."""
    count = 400 if device.type == "cuda" else 5
    logits = torch.full((count, 1000), -1.0)
    logits[:, 50:950] = 0.0
    logits[:, 51:950:2] = -0.0
    logits[:, 900:905] = 1.0
    given = on(device, same_options(count, top_k=12, temperature=5.0))
    tokens, _ = sample(logits.to(device), **given, tuning=tuning)
    kept = set(range(50, 57)) | set(range(900, 905))
    assert set(tokens.tolist()) <= kept
    assert len(set(tokens.tolist()) & set(range(50, 57))) > 1


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 4, "top_p": 0.01}])
def test_zeros_of_either_sign_rank_by_rising_id(device, filters):
    """Few of them, so that they are ranked by a sort."""
    logits = torch.full((1, 1000), -9.0)
    logits[:, 51::300] = 0.0
    logits[:, 51] = -0.0
    tokens, _ = sample(logits.to(device), **on(device, same_options(1, **filters)), tuning=SMALL)
    assert tokens.tolist() == [51]


@pytest.mark.parametrize("tuning", [SMALL, SCANNING], ids=["gathered", "scanned"])
@pytest.mark.parametrize("top_k", [3, 100])
def test_top_p_is_a_share_of_what_top_k_keeps(device, top_k, tuning):
    """Of nearly equal weights: half of the kept ones, where half of all would be every one of them."""
    logits = (torch.arange(1000) * -1e-3).expand(8, -1).to(device)
    assert_agrees(logits, same_options(8, top_k=top_k, top_p=0.5, temperature=100.0), tuning)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}])
def test_rounding_noise_in_the_logits_changes_no_draw(gpu, filters):
    logits = torch.randn(1000, 8192, device=gpu) * 2
    noisy = logits + torch.randn_like(logits) * 2e-6
    given = on(gpu, same_options(1000, temperature=0.8, **filters))
    plain, moved = (sample(x, **given)[0] for x in (logits, noisy))
    assert int((plain != moved).sum()) <= 1


def test_broken_and_padded_rows_harm_nobody(device):
    logits, given = torch.randn(8, 700), options(8, 4)
    given["temperature"] = torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0, 1.0, 1.0, 0.0])
    whole, _ = sample(logits.to(device), **on(device, given), tuning=SMALL)
    broken = logits.clone()
    broken[0], broken[1], broken[2, 699], broken[3, 3] = torch.nan, torch.nan, torch.inf, -torch.inf
    broken[4, ::2] = torch.nan
    tokens, finite = sample(broken.to(device), **on(device, given), tuning=SMALL)
    assert finite.tolist() == [False] * 5 + [True] * 3
    assert bool(((tokens >= 0) & (tokens < 700)).all())
    assert torch.equal(tokens[5:], whole[5:])
    picked, flags = greedy(broken.to(device), chunk=256)
    assert torch.equal(flags, finite)
    assert bool(((picked >= 0) & (picked < 700)).all())
    assert torch.equal(picked[5:].cpu(), logits[5:].argmax(-1))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_never_draws_a_forbidden_token(device, filters):
    logits = torch.full((2, 1000), torch.finfo(torch.float32).min)
    logits[:, 700] = 1.0
    given = same_options(2, **filters)
    tokens, finite = sample(logits.to(device), **on(device, given), tuning=SMALL)
    assert tokens.tolist() == [700, 700]
    assert bool(finite.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_ids(device, dtype):
    logits = torch.zeros(4, 5001, dtype=dtype, device=device)
    logits[1, 4200:] = 2.0
    logits[2, 17] = logits[2, 4999] = 9.0
    logits[3] = -7.0
    tokens, finite = greedy(logits)
    assert tokens.tolist() == [0, 4200, 17, 0]
    assert bool(finite.all())


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-30, 1e-42])
def test_tiny_temperature_is_greedy(device, filters, temperature):
    logits = torch.randn(2, 600).to(device)
    given = on(device, same_options(2, temperature=temperature, **filters))
    assert torch.equal(sample(logits, **given, tuning=SMALL)[0], logits.argmax(-1))


@pytest.mark.parametrize("name", [*NAMES, "keys"])
def test_options_of_fewer_rows_are_refused(device, name):
    given = on(device, same_options(2))
    with pytest.raises(AssertionError):
        sample(torch.zeros(2, 10, device=device), **(given | {name: given[name][:1]}))


def test_columns_that_do_not_lie_side_by_side_are_refused(device):
    logits, given = torch.randn(10, 2, device=device).T, on(device, same_options(2))
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    for call in (
        lambda: sample(logits, **given),
        lambda: greedy(logits),
        lambda: token_logprobs(logits, ids, 1),
        lambda: penalize_batch(logits, ids[:, None], ids, ids, *(given["temperature"],) * 3),
        lambda: bias_batch(logits, ids[:, None], given["min_p"][:, None], ids[:, None]),
    ):
        with pytest.raises(AssertionError):
            call()


def test_no_rows(device):
    given = on(device, same_options(1))
    tokens, finite = sample(torch.zeros(0, 10, device=device), **{n: x[:0] for n, x in given.items()})
    assert tokens.shape == finite.shape == (0,)


def test_a_graph_holds_it_and_no_batch_recompiles(gpu, count_variants):
    kernels = (
        module.choose_pivots,
        module.measure_chunks,
        module.locate,
        module.gather_between,
        module.resolve,
    )
    logits, given = torch.randn(33, 50257, device=gpu) * 2, on(gpu, options(33, 5))
    expected, _ = sample(logits, **given)
    variants = count_variants(*kernels)
    for rows in (1, 2, 16, 17, 32):
        tokens, _ = sample(logits[:rows], **{n: x[:rows] for n, x in given.items()})
        assert torch.equal(tokens, expected[:rows])
    assert count_variants(*kernels) == variants
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finite = sample(logits, **given)
    logits.copy_(logits.flip(0))
    for x in given.values():
        x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(tokens, expected.flip(0))
    assert bool(finite.all())
