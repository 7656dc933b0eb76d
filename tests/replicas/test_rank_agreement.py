"""What says whether ranks give one rank's tokens: it accepts them, random weights too, and nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridserve.replicas.llm import LLM

from .small_shape import SMALL

PROMPTS = [[7 * at % 500 for at in range(1, size)] for size in (2, 6, 70)]

Make = Callable[..., LLM]


@pytest.fixture
def make(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(ranks, seed): random weights of the seed. The benchmark's own modules can be imported."""
    monkeypatch.syspath_prepend(str(repo_root / "tests" / "benchmarks" / "offline"))
    made: list[LLM] = []

    def build(ranks: int, seed: int) -> LLM:
        made.append(
            LLM(
                str(repo_root / "configs" / "models" / "qwen3.5-9b.yaml"),
                load_format="dummy",
                hf_overrides={**SMALL, "vocab_size": 512},
                device="cpu",
                dtype="float32",
                tensor_parallel_size=ranks,
                cache_memory_bytes=2**22,
                num_threads=1,
                show_progress=False,
                seed=seed,
            )
        )
        return made[-1]

    yield build
    for llm in made:
        llm.shutdown()


def test_ranks_draw_the_same_random_weights_and_others_are_told_apart(make: Make) -> None:
    from agreement import compare, reference_answers

    answers, noise = reference_answers(make(1, 0), PROMPTS, 12)
    assert noise < 1e-4
    same = compare(make(2, 0), answers, noise)
    # no two of its tokens are as near as fp32's rounding
    assert same.equal_tokens == same.equal_before_difference == same.tokens == 36
    assert same.equal_answers == 3 and same.is_rounding and max(same.moved) < 1e-4
    other = compare(make(1, 1), answers, noise)
    assert not other.is_rounding and other.equal_tokens < 18
    assert len(other.gaps) == 36 - other.equal_tokens and len(other.first_gaps) == 3
    assert max(other.gaps) > 100 * other.bound and "NO" in other.lines()[-1]


def test_a_difference_of_near_tokens_is_rounding(make: Make) -> None:
    """The candidate goes on behind it with the reference's token."""
    from agreement import Answer, compare, reference_answers

    llm = make(1, 0)
    [answer], noise = reference_answers(llm, PROMPTS[1:2], 6)
    ranked = sorted(answer.logprobs[0], key=answer.logprobs[0].get, reverse=True)
    # as if the reference had found the second token a hair likelier
    known = dict(answer.logprobs[0])
    known[ranked[1]] = known[ranked[0]] + noise
    [rest], _ = reference_answers(llm, [[*answer.prompt, ranked[1]]], 5)
    reference = Answer(answer.prompt, [ranked[1], *rest.token_ids], [known, *rest.logprobs])
    found = compare(llm, [reference], noise)
    assert (found.equal_tokens, found.equal_before_difference, found.equal_answers) == (5, 0, 0)
    assert found.gaps == found.first_gaps == [pytest.approx(noise)] and found.is_rounding
