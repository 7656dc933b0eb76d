"""The sampler against a full sort in Python floats; penalties, logprobs and random numbers."""

import math

import pytest
import torch

from hybridserve.kernels.sampler import penalize, rows_finite, sample, token_logprobs, uniform_from_seed
from hybridserve.kernels.sampler.reference import sample_reference

# computed once with unbounded integers; a change breaks every seeded request
PINNED = [0.6524484863740322, 0.36818951565166946, 0.7012121095215252, 0.036565227777470954]


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
        "uniform": torch.rand(count, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_sample_agrees_with_a_full_sort(vocab, spread):
    logits, given = torch.randn(60, vocab) * spread, options(60)
    tokens = sample(logits, **given)
    columns = [x.double().tolist() for x in given.values()]
    columns[1] = given["top_k"].tolist()
    for row, token, *row_options in zip(logits.double().tolist(), tokens.tolist(), *columns, strict=True):
        *filters, uniform = row_options
        # fp32 weights place a boundary within 1e-6 of the exact one
        near = {
            sample_reference(row, *filters, min(max(uniform + d, 0.0), 1 - 2**-53)) for d in (-1e-6, 0, 1e-6)
        }
        assert token in near


@pytest.mark.parametrize("vocab", [600, 3000])
def test_sample_with_equal_logits(vocab):
    logits = torch.randint(0, 3, (60, vocab)).float()
    given = options(60, 1)
    tokens = sample(logits, **given)
    for b in range(60):
        filters = [given[name][b].item() for name in ("temperature", "top_k", "top_p", "min_p")]
        u = given["uniform"][b].item()
        near = {
            sample_reference(logits[b].tolist(), *filters, min(max(u + d, 0.0), 1 - 2**-53))
            for d in (-1e-6, 0, 1e-6)
        }
        assert tokens[b].item() in near


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
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ones = torch.ones(count)
    tokens = sample(logits.expand(count, -1), ones, (ones * top_k).long(), ones * top_p, ones * 0, uniform)
    probability = logits.softmax(0)
    values, order = probability.sort(descending=True)
    keep = torch.ones(7, dtype=torch.bool)
    if top_k:
        keep[top_k:] = False
    keep &= (values.cumsum(0) - values) < top_p
    expected = torch.zeros(7)
    expected[order] = values * keep
    frequency = torch.bincount(tokens, minlength=7) / count
    assert torch.allclose(frequency, expected / expected.sum(), atol=2 / count)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("top_k", [0, 3])
def test_sample_never_draws_a_masked_token(uniform, top_k):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 700] = 1.0
    one = torch.ones(1)
    token = sample(
        logits, one, torch.tensor([top_k]), one, one * 0, torch.tensor([uniform], dtype=torch.float64)
    )
    assert token.item() == 700


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
    assert sample(logits, zero, zero.long(), zero + 1, zero, zero.double()).tolist() == [0, 4000, 17]


def test_sample_tiny_temperature_is_greedy():
    logits, one = torch.randn(4, 3000), torch.ones(4)
    tokens = sample(logits, one * 1e-30, one.long() * 0, one, one * 0, torch.rand(4, dtype=torch.float64))
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


def test_rows_finite():
    logits = torch.rand(5, 100) * 3e38
    logits[1, 3], logits[2, 99], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    assert rows_finite(logits).tolist() == [True, False, False, False, True]


def test_uniform_from_seed_is_stable():
    assert uniform_from_seed(0, 0) == uniform_from_seed(2**64, 0)
    assert uniform_from_seed(-1, 5) == uniform_from_seed(2**64 - 1, 5)
    assert [uniform_from_seed(s, p) for s, p in ((0, 0), (1, 0), (0, 1), (-7, 1000))] == PINNED


def test_uniform_from_seed_is_uniform_and_uncorrelated():
    grid = torch.tensor(
        [[uniform_from_seed(s, p) for p in range(200)] for s in range(200)], dtype=torch.float64
    )
    assert grid.min() >= 0 and grid.max() < 1
    counts = torch.histc(grid, 50, 0, 1)
    chi2 = ((counts - 800) ** 2 / 800).sum().item()
    # 49 degrees of freedom: mean 49, standard deviation sqrt(98)
    assert abs(chi2 - 49) < 4 * math.sqrt(98)
    centred = grid - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(shifted.mean()) < 4 / 12 / math.sqrt(shifted.numel())
