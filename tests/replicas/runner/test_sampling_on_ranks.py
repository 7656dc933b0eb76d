"""Draws from logits that lie on several ranks: the same on all of them, and the same as on one."""

import runpy
from pathlib import Path

import pytest

from hybridserve.parallel.group import SINGLE, TensorParallelGroup
from hybridserve.parallel.vocabulary import VocabularyShard

PROGRAM = Path(__file__).with_name("draws_on_ranks.py")


@pytest.fixture(scope="module")
def program() -> dict[str, object]:
    return runpy.run_path(str(PROGRAM))


def assert_same(found, expected) -> None:
    """Tokens, ranks and the likeliest ids alike; log-probabilities up to the rounding of their sums."""
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    for (*_, ours), (*_, theirs) in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_logprobs(ours, theirs)


def assert_same_logprobs(ours, theirs) -> None:
    logprob, rank, ids, values = theirs
    assert ours[1:3] == (rank, ids)
    assert [ours[0], *ours[3]] == pytest.approx([logprob, *values], abs=2e-5)


@pytest.mark.parametrize(
    ("tp_size", "vocab", "rows"), [(2, 97, 30), (4, 97, 30), (2, 3001, 45), (4, 6000, 45), (8, 97, 15)]
)
def test_several_ranks_draw_what_one_draws(on_ranks, program, tp_size, vocab, rows) -> None:
    expected, _ = program["draw"](SINGLE, vocab, rows)
    assert len({row[0] for row in expected}) > rows // 3
    ranks = on_ranks(tp_size, PROGRAM, "draw", vocab=vocab, rows=rows)
    for found, _ in ranks:
        assert_same(found, expected)
        assert found == ranks[0][0]


def test_rows_without_filters_alone(on_ranks, program) -> None:
    """Which are drawn without waiting for the host; the rows of temperature 1 differ in their seeds."""
    options = {"vocab": 97, "rows": 60, "filters": False, "scale": 0.5}
    expected, _ = program["draw"](SINGLE, **options)
    assert len({row[0] for row in expected}) > 8
    for found, num_gathered in on_ranks(4, PROGRAM, "draw", **options):
        assert_same(found, expected)
        assert num_gathered == 0


def test_only_rows_beyond_the_candidates_are_gathered(on_ranks, program) -> None:
    """6,000 equally likely ids: 0.9 of them are more than the 1,024 that the ranks tell of."""
    options = {"vocab": 6000, "rows": 15, "scale": 0.001}
    expected, _ = program["draw"](SINGLE, **options)
    for found, num_gathered in on_ranks(2, PROGRAM, "draw", **options):
        assert_same(found, expected)
        # of 15 kinds of rows: four with top_p, one with min_p alone, one with a top_k beyond the candidates
        assert num_gathered == 6
    for _, num_gathered in on_ranks(2, PROGRAM, "draw", vocab=6000, rows=15, scale=8.0):
        # a top_k of 1,500 needs to know the weight of as many
        assert num_gathered == 1


@pytest.mark.parametrize("column", [0, 96])
def test_broken_logits_of_one_rank_are_known_to_all(on_ranks, program, column) -> None:
    expected = program["draw_poisoned"](SINGLE, 97, column)
    ranks = on_ranks(2, PROGRAM, "draw_poisoned", vocab=97, column=column)
    assert [finite for _, finite in ranks[0]] == [True, False, True, True, False, True]
    for found in ranks:
        assert found == ranks[0] and all(0 <= token < 97 for token, _ in found)
        assert [row for row in found if row[1]] == [row for row in expected if row[1]]


@pytest.mark.parametrize("num_top", [0, 5, 40])
def test_logprobs_of_given_tokens(on_ranks, program, num_top) -> None:
    expected = program["logprobs_of"](SINGLE, 97, num_top)
    for found in on_ranks(4, PROGRAM, "logprobs_of", vocab=97, num_top=num_top):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_logprobs(ours, theirs)


def test_every_id_is_on_one_rank() -> None:
    parts = [VocabularyShard(97, TensorParallelGroup(rank, 8, backend=object())) for rank in range(8)]
    assert [(p.start, p.end) for p in parts] == [(13 * r, min(13 * r + 13, 97)) for r in range(8)]


def test_a_rank_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_size 8 leaves a rank without tokens of vocab_size 10"):
        VocabularyShard(10, TensorParallelGroup(0, 8, backend=object()))
