"""Percentiles, goodput and buckets by hand."""

import pytest

from hybridserve.cluster.simulation.outcomes import Outcome, Slo, bucket_names, figures, quantile, quantiles

SLO = Slo(1.0, 0.1)


def outcome(at: float, length: int, first: float, end: float, tokens: int = 11) -> Outcome:
    return Outcome(at, length, length - tokens, tokens, first, end)


def test_quantiles() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [quantile(hundred, q) for q in (0.0, 0.5, 0.9, 0.99, 0.991, 1.0)] == [1, 50, 90, 99, 100, 100]
    assert quantile([3.0], 0.99) == 3.0
    found = quantiles(list(reversed(hundred)))
    assert (found.p50, found.p90, found.p99, found.count) == (50, 90, 99, 100)
    assert quantiles([]).p99 is None


def test_an_objective_needs_both_and_a_good_end() -> None:
    assert SLO.met_by(outcome(0, 100, 1.0, 2.0))
    assert not SLO.met_by(outcome(0, 100, 1.1, 1.2))
    assert not SLO.met_by(outcome(0, 100, 0.5, 1.6))
    # one token has nothing between
    assert SLO.met_by(outcome(0, 100, 0.5, 0.5, tokens=1))
    assert not SLO.met_by(Outcome(0, 100, 90, 10, 0.5, 0.6, "timeout"))
    assert not SLO.met_by(Outcome(0, 100, 90, 0, None, 0.0, "429 token_budget"))


def test_figures_by_bucket() -> None:
    outcomes = [
        outcome(0.0, 100, 0.2, 1.0),
        outcome(1.0, 256, 0.4, 1.0),
        outcome(2.0, 257, 3.0, 8.0),
        Outcome(3.0, 300, 250, 0, None, 0.0, "429 token_budget"),
    ]
    found = figures(outcomes, [256], SLO)
    assert [one.name for one in found.buckets] == ["0-256", "257 and more", "all"]
    short, long, both = found.buckets
    assert (short.requests, short.ok, short.goodput_share) == (2, 2, 1.0)
    assert (short.ttft.p50, short.ttft.p99) == (0.2, 0.4)
    assert short.itl.p50 == pytest.approx(0.06) and short.e2e.p99 == 1.0
    assert (long.requests, long.ok, long.goodput_share) == (2, 1, 0.0)
    assert long.ends == {"429 token_budget": 1} == both.ends
    # from the first arrival to the last end
    assert found.seconds == 10.0
    assert both.goodput_per_s == pytest.approx(0.2)
    assert found.answer_tokens_per_s == pytest.approx(3.3)
    assert found.prompt_tokens_per_s == pytest.approx((89 + 245 + 246) / 10)


def test_without_buckets_and_without_requests() -> None:
    assert [one.name for one in figures([outcome(0, 9, 1, 1)], [], SLO).buckets] == ["all"]
    empty = figures([], [256], SLO)
    assert empty.seconds == 0 and empty.buckets[-1].goodput_share == 0
    assert bucket_names([10, 20]) == ["0-10", "11-20", "21 and more"]
