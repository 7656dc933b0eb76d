"""The sampler's batching: each row gets what its own spec asks, and nothing of its neighbours."""

import math

import pytest
import torch

from hybridserve.replicas.engine.plan import SampleSpec
from hybridserve.replicas.runner.draws import FetchedDraws
from hybridserve.replicas.runner.sampling import Sampler
from hybridserve.replicas.sampling_params import SamplingParams

VOCAB = 300


class SampledAtOnce:
    """Draws, and waits for what was drawn."""

    def __init__(self) -> None:
        self._sampler = Sampler(torch.device("cpu"))

    def sample(self, logits, specs):
        return FetchedDraws(self._sampler.draw(logits, specs), specs).sampled()


@pytest.fixture
def sampler():
    return SampledAtOnce()


def spec(seed=1, position=7, token_ids=(3, 4, 5), prompt_len=2, banned=(), **params):
    return SampleSpec(SamplingParams(**params), seed, position, prompt_len, list(token_ids), banned)


def logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


SPECS = [
    spec(temperature=0),
    spec(temperature=0, logprobs=3),
    spec(temperature=0.8, seed=11),
    spec(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=12, logprobs=0),
    spec(temperature=0, repetition_penalty=1.8, presence_penalty=1.0, token_ids=(3, 4, 5, 5), logprobs=2),
    spec(temperature=0.7, logit_bias={9: 5.0, 10: -100.0}, seed=13),
    spec(temperature=0, banned=(1, 2)),
]


def test_a_row_does_not_depend_on_its_batch(sampler):
    table = logits(len(SPECS))
    together = sampler.sample(table.clone(), SPECS)
    backwards = sampler.sample(table.flip(0).clone(), SPECS[::-1])[::-1]
    alone = [sampler.sample(table[i : i + 1].clone(), [s])[0] for i, s in enumerate(SPECS)]
    assert together == alone == backwards


def test_greedy_takes_the_largest_logit(sampler):
    table = logits(4)
    drawn = sampler.sample(table.clone(), [spec(temperature=0)] * 4)
    assert [d.token_id for d in drawn] == table.argmax(-1).tolist()
    assert all(d.finite and d.logprobs is None for d in drawn)


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(sampler):
    table = logits(1)
    [wanted] = sampler.sample(table.clone(), [spec(temperature=1.0, top_k=VOCAB)])
    assert sampler.sample(table.clone(), [spec(temperature=1.0, top_k=10**30)]) == [wanted]


def test_the_draw_follows_seed_and_position_alone(sampler):
    table = torch.zeros(1, VOCAB)

    def draw(**options):
        return sampler.sample(table.clone(), [spec(**options)])[0].token_id

    assert draw(seed=5, position=9) == draw(seed=5, position=9)
    assert len({draw(seed=5, position=p) for p in range(40)}) > 25
    assert len({draw(seed=s, position=9) for s in range(40)}) > 25


def test_draws_have_the_distribution_of_the_logits(sampler):
    row = torch.full((1, VOCAB), -1e4)
    row[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    count = 4000
    drawn = sampler.sample(row.repeat(count, 1), [spec(seed=s) for s in range(count)])
    share = torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=3) / count
    # four standard deviations of a binomial share at its widest
    assert (share[:3] - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 4 * 0.5 / count**0.5


def test_banned_and_biased_tokens(sampler):
    table = logits(1)
    best, second = table[0].topk(2).indices.tolist()
    assert sampler.sample(table.clone(), [spec(temperature=0, banned=(best,))])[0].token_id == second
    biased = spec(temperature=0, logit_bias={17: 100.0})
    assert sampler.sample(table.clone(), [biased])[0].token_id == 17


def test_penalties_count_prompt_and_output_as_documented(sampler):
    table = torch.zeros(1, VOCAB)
    table[0, 5], table[0, 6] = 2.0, 1.6
    # token 5 was generated twice: 2.0 - 0.2 - 2 * 0.15 = 1.5
    penalised = spec(
        temperature=0, presence_penalty=0.2, frequency_penalty=0.15, token_ids=(1, 5, 5), prompt_len=1
    )
    assert sampler.sample(table.clone(), [penalised])[0].token_id == 6
    in_prompt = spec(
        temperature=0, presence_penalty=0.2, frequency_penalty=0.15, token_ids=(5, 5), prompt_len=2
    )
    assert sampler.sample(table.clone(), [in_prompt])[0].token_id == 5
    repeated = spec(temperature=0, repetition_penalty=1.5, token_ids=(5, 5), prompt_len=2)
    assert sampler.sample(table.clone(), [repeated])[0].token_id == 6


def test_logprobs_are_those_of_the_raw_logits(sampler):
    table = logits(1)
    want = table[0].double().log_softmax(-1)
    best = table[0].topk(3).indices.tolist()
    got = sampler.sample(table.clone(), [spec(temperature=0.5, top_k=1, banned=(best[0],), logprobs=3)])[0]
    assert got.token_id == best[1]
    assert got.logprobs.rank == 2
    assert got.logprobs.top_token_ids == tuple(best)
    assert got.logprobs.logprob == pytest.approx(want[best[1]].item(), abs=1e-5)
    assert got.logprobs.top_logprobs == pytest.approx(want[best].tolist(), abs=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0, "logprobs": 2}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.5}]
)
def test_a_poisoned_row_is_flagged_and_its_neighbours_are_not_touched(sampler, poison, params):
    table = logits(3)
    clean = sampler.sample(table.clone(), [spec(**params)] * 3)
    table[1, 100] = poison
    got = sampler.sample(table.clone(), [spec(**params)] * 3)
    assert [g.finite for g in got] == [True, False, True]
    assert (got[0], got[2]) == (clean[0], clean[2])
    assert 0 <= got[1].token_id < VOCAB
