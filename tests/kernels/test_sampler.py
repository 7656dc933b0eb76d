"""The sampler against a full sort in Python floats; penalties, logprobs and random numbers."""

import math

import pytest
import torch

from hybridserve.kernels import sampler
from hybridserve.kernels.sampler import draw_key, rows_finite, token_logprobs
from hybridserve.kernels.sampler.cpu import penalize, sample
from hybridserve.kernels.sampler.random import gumbel_noise
from hybridserve.kernels.sampler.reference import kept_reference, sample_reference, scores_reference

# computed once with unbounded integers; a change breaks every seeded request
PINNED = [
    (-6411193824288604561, 0.9716234283132632),
    (6791897765849424158, -0.6241692183992433),
    (-5511663747979980962, 0.7036252392558366),
    (674509398807902766, 0.21252100663698997),
]


def options(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every mix of filters on and off, a greedy row now and then."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return {
        "temperature": choose([0.0, 0.2, 0.7, 1.0, 1.0, 5.0]),
        "top_k": choose([0, -1, 1, 2, 40, 300, 10**6]),
        "top_p": choose([1.0, 1.0, 0.01, 0.5, 0.95, 0.999]),
        "min_p": choose([0.0, 0.0, 0.05, 0.5, 1.0]),
        "keys": torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
    }


def assert_drawn_rightly(logits: torch.Tensor, tokens: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """Each token is the reference's, or one that rounding in fp32 cannot tell from it."""
    rows = zip(logits.double().tolist(), tokens.tolist(), *(x.tolist() for x in given.values()), strict=True)
    for row, token, temperature, top_k, top_p, min_p, key in rows:
        if token == sample_reference(row, temperature, top_k, top_p, min_p, key):
            continue
        assert temperature > 0
        scores = scores_reference(row, temperature, key)
        # fp32 weights place the boundary of top_p or min_p within 1e-6 of the exact one
        kept = [
            kept_reference(row, temperature, top_k, p if top_p < 1 else 1.0, m)
            for p, m in ((top_p - 1e-6, min_p + 1e-6), (top_p + 1e-6, min_p - 1e-6))
        ]
        best = [max(scores[i] for i in tokens_left) for tokens_left in kept if tokens_left]
        assert any(token in tokens_left for tokens_left in kept)
        assert any(abs(scores[token] - b) < 1e-4 * max(1.0, abs(b)) for b in best)


@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_sample_agrees_with_a_full_sort(vocab, spread):
    logits, given = torch.randn(60, vocab) * spread, options(60)
    assert_drawn_rightly(logits, sample(logits, **given), given)


@pytest.mark.parametrize("vocab", [600, 3000])
def test_sample_with_equal_logits(vocab):
    logits, given = torch.randint(0, 3, (60, vocab)).float(), options(60, 1)
    assert_drawn_rightly(logits, sample(logits, **given), given)


def test_rounding_noise_in_the_logits_changes_no_draw():
    """What another batch does to a row: a few units in the last place, which a seed must survive."""
    torch.manual_seed(0)
    rows, vocab = 600, 8192
    logits = torch.randn(rows, vocab) * 2
    noisy = logits + torch.randn(rows, vocab) * 2e-6
    ones, keys = torch.ones(rows), torch.randint(-(2**63), 2**63 - 1, (rows,))
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.95)):
        filters = (ones * 0.8, (ones * top_k).long(), ones * top_p, ones * 0, keys)
        assert (sample(logits, *filters) != sample(noisy, *filters)).sum() <= 1


def test_a_filter_that_keeps_everything_changes_no_draw():
    logits, ones = torch.randn(50, 700), torch.ones(50)
    keys = torch.arange(50) * 7919
    plain = sample(logits, ones, ones.long() * 0, ones, ones * 0, keys)
    assert torch.equal(plain, sample(logits, ones, ones.long() * 700, ones, ones * 0, keys))


def test_sample_rows_are_their_own_in_any_batch():
    logits, given = torch.randn(64, 3001) * 3, options(64)
    tokens, order = sample(logits, **given), torch.randperm(64)
    permuted = sample(logits[order], **{name: x[order] for name, x in given.items()})
    assert torch.equal(permuted, tokens[order])
    alone = [sample(logits[b : b + 1], **{n: x[b : b + 1] for n, x in given.items()}) for b in range(64)]
    assert torch.equal(torch.cat(alone), tokens)


@pytest.mark.parametrize("filters", [(0, 1.0), (5, 1.0), (0, 0.9)])
def test_sample_draws_from_the_distribution(filters):
    count, logits = 20000, torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, -torch.inf, 3.0])
    top_k, top_p = filters
    ones = torch.ones(count)
    keys = torch.tensor([draw_key(seed, 3) for seed in range(count)])
    tokens = sample(logits.expand(count, -1), ones, (ones * top_k).long(), ones * top_p, ones * 0, keys)
    probability = logits.softmax(0)
    values, order = probability.sort(descending=True)
    keep = torch.ones(7, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    keep &= (values.cumsum(0) - values) < top_p
    expected = torch.zeros(7)
    expected[order] = values * keep
    expected /= expected.sum()
    frequency = torch.bincount(tokens, minlength=7) / count
    # four standard deviations of a share, and nothing where nothing may be drawn
    assert ((frequency - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize("top_k", [0, 3])
def test_sample_never_draws_a_masked_token(top_k):
    logits = torch.full((500, 1000), -torch.inf)
    logits[:, 700] = 1.0
    ones = torch.ones(500)
    tokens = sample(logits, ones, (ones * top_k).long(), ones, ones * 0, torch.arange(500) << 40)
    assert (tokens == 700).all()


def test_sample_stays_in_range_on_nan_rows():
    logits = torch.randn(8, 1000)
    logits[::2] = torch.nan
    given = options(8)
    given["temperature"] = torch.ones(8)
    tokens = sample(logits, **given)
    assert bool(((tokens >= 0) & (tokens < 1000)).all())
    logits[::2] = 0.0
    assert torch.equal(sample(logits, **given)[1::2], tokens[1::2])


def test_sample_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 5000)
    logits[1, 4000:] = 2.0
    logits[2, 17] = logits[2, 4999] = 9.0
    zero = torch.zeros(3)
    assert sample(logits, zero, zero.long(), zero + 1, zero, zero.long()).tolist() == [0, 4000, 17]


def test_sample_tiny_temperature_is_greedy():
    logits, one = torch.randn(4, 3000), torch.ones(4)
    tokens = sample(logits, one * 1e-30, one.long() * 0, one, one * 0, torch.arange(4))
    assert torch.equal(tokens, logits.argmax(-1))


def test_penalize_one_row():
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0, 0.0])
    penalize(logits, torch.tensor([0, 1, 1]), torch.tensor([2, 3, 3, 3]), 2.0, 0.5, 0.25)
    assert logits.tolist() == [1.0, -4.0, 2.0 - 0.75, -8.0 - 1.25, 1.0, 0.0]


def test_penalize_rows_and_nothing():
    logits = torch.randn(3, 10)
    before = logits.clone()
    empty, ids = torch.tensor([], dtype=torch.int64), torch.tensor([1, 2])
    penalize(
        logits, [ids, empty, ids], [ids, empty, empty], [1.0, 2.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]
    )
    assert torch.equal(logits, before)
    penalize(logits, [empty] * 3, [ids, empty, ids], [1.0] * 3, [1.0, 1.0, 0.0], [0.0] * 3)
    assert torch.equal(logits[1:], before[1:])
    assert torch.allclose(logits[0, ids], before[0, ids] - 1)


def test_token_logprobs():
    logits = torch.randn(5, 2000)
    logits[1] = 0.0
    logits[2, 50:60] = 9.0
    ids = torch.tensor([0, 1999, 55, 7, 8])
    logprob, rank, top_ids, top = token_logprobs(logits, ids, 5)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(logprob.double(), exact.gather(1, ids[:, None])[:, 0], atol=1e-5)
    for r in range(5):
        ranked = sorted(range(2000), key=lambda i: (-logits[r, i].item(), i))[:5]
        assert top_ids[r].tolist() == ranked
        assert torch.allclose(top[r].double(), exact[r, ranked], atol=1e-5)
        assert rank[r] == 1 + int((logits[r] > logits[r, ids[r]]).sum())
    assert rank[1] == 1
    assert rank[2] == 1


@pytest.mark.parametrize("num_top", [0, 1, 7])
def test_token_logprobs_of_a_tiny_vocabulary(num_top):
    logits = torch.randn(2, 7)
    _, _, top_ids, top = token_logprobs(logits, torch.tensor([0, 1]), num_top)
    assert top_ids.shape == top.shape == (2, num_top)
    assert torch.equal(top_ids, logits.sort(dim=-1, descending=True, stable=True)[1][:, :num_top])


def test_batches_as_on_a_gpu():
    """Seeds hashed as by `draw_key`, the flag beside the tokens, and broken rows that harm nobody."""
    seeds, positions = [0, 2**63 - 1, -(2**63), -1, 12345, 7], [3, 2**40, 7, 1, 131072, 0]
    logits, given = torch.randn(6, 300) * 2, options(6, 3)
    given["keys"] = torch.tensor([draw_key(s, p) for s, p in zip(seeds, positions, strict=True)])
    expected = sample(logits, **given)
    del given["keys"]
    tokens, finite = sampler.sample_seeded(
        logits, **given, seeds=torch.tensor(seeds), positions=torch.tensor(positions)
    )
    assert torch.equal(tokens, expected)
    assert bool(finite.all())
    logits[0], logits[1, 5], logits[2, 7] = torch.nan, torch.inf, -torch.inf
    given["keys"] = torch.tensor([draw_key(s, p) for s, p in zip(seeds, positions, strict=True)])
    tokens, finite = sampler.sample(logits, **given)
    assert finite.tolist() == [False] * 3 + [True] * 3
    assert torch.equal(tokens[3:], expected[3:])
    picked, flags = sampler.greedy(logits)
    assert torch.equal(flags, finite)
    assert torch.equal(picked[3:], logits[3:].argmax(-1))
    assert all(0 <= t < 300 for t in [*tokens.tolist(), *picked.tolist()])


def test_rows_finite():
    logits = torch.rand(5, 100) * 3e38
    logits[1, 3], logits[2, 99], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    assert rows_finite(logits).tolist() == [True, False, False, False, True]


def test_draw_keys_and_noise_are_stable():
    assert draw_key(0, 0) == draw_key(2**64, 0)
    assert draw_key(-1, 5) == draw_key(2**64 - 1, 5)
    keys = [draw_key(seed, position) for seed, position in ((0, 0), (1, 0), (0, 1), (-7, 1000))]
    assert keys == [key for key, _ in PINNED]
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert [gumbel_noise(key, 5) for key in keys] == pytest.approx([noise for _, noise in PINNED], rel=1e-12)


def test_noise_is_gumbel_and_uncorrelated():
    """Over seeds, positions and ids: exp(-exp(-noise)) is uniform, and neighbours are independent."""
    noise = torch.tensor(
        [[[gumbel_noise(draw_key(s, p), i) for i in range(30)] for p in range(30)] for s in range(30)],
        dtype=torch.float64,
    )
    uniform = noise.neg().exp().neg().exp()
    counts = torch.histc(uniform, 50, 0, 1)
    chi2 = ((counts - 540) ** 2 / 540).sum().item()
    # 49 degrees of freedom: mean 49, standard deviation sqrt(98)
    assert abs(chi2 - 49) < 4 * math.sqrt(98)
    centred = uniform - 0.5
    for axis in range(3):
        ahead = centred.narrow(axis, 1, 29) * centred.narrow(axis, 0, 29)
        assert abs(ahead.mean()) < 4 / 12 / math.sqrt(ahead.numel())
