"""An answer that one engine began and another goes on with."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridserve.replicas.sampling_params import SamplingParams

from .conftest import MIXERS, VOCAB, next_token


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(engine) -> tuple[list[int], int, str | None]:
    """What the engine's one request gains, from which index on, and how it ends."""
    tokens: list[int] = []
    first, reason = -1, None
    while engine.has_unfinished():
        for out in engine.step():
            first = out.first_index if first < 0 else first
            assert out.first_index == first + len(tokens)
            tokens += out.token_ids
            reason = out.finish_reason
    engine.arena.check_integrity()
    assert engine.arena.free_extents == engine.arena.num_extents
    return tokens, first, reason


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.sampled_from(sorted(MIXERS)),
    prompt_len=st.integers(1, 130),
    max_tokens=st.integers(2, 30),
    cut=st.integers(1, 29),
    budget=st.sampled_from([1, 64, 100]),
)
def test_it_goes_on_wherever_it_was_cut(make_engine, mix, prompt_len, max_tokens, cut, budget):
    engine, executor = make_engine(mix, 6, budget)
    prompt = [(7 * i + prompt_len) % VOCAB for i in range(prompt_len)]
    wanted = answer(prompt, max_tokens)
    cut = min(cut, max_tokens - 1)
    engine.add_request("r", prompt, SamplingParams(max_tokens=max_tokens, temperature=0), wanted[:cut])
    assert run(engine) == (wanted[cut:], cut, "length")
    drawn = [s.sample.position for plan in executor.plans for s in plan.sequences if s.sample is not None]
    assert drawn == list(range(prompt_len + cut, prompt_len + max_tokens))


def test_end_tokens_and_the_context_count_from_the_prompt(make_engine):
    prompt = [3, 1, 4]
    wanted = answer(prompt, 20)
    engine, _ = make_engine(eos=(wanted[9],))
    end = wanted.index(wanted[9])
    engine.add_request("r", prompt, SamplingParams(max_tokens=20, temperature=0), wanted[:2])
    assert run(engine) == (wanted[2 : end + 1], 2, "stop")
    engine, _ = make_engine(max_model_len=10)
    engine.add_request("r", prompt, SamplingParams(max_tokens=20, temperature=0), wanted[:2])
    assert run(engine) == (wanted[2:7], 2, "length")


def test_min_tokens_are_those_of_the_whole_answer(make_engine):
    prompt, end = [3, 1, 4], 7
    engine, executor = make_engine(eos=(end,))
    params = SamplingParams(max_tokens=8, min_tokens=5, temperature=0)
    engine.add_request("r", prompt, params, answer(prompt, 3))
    run(engine)
    banned = [s.sample.banned_token_ids for plan in executor.plans for s in plan.sequences if s.sample]
    assert banned[:3] == [(end,), (end,), ()]


@pytest.mark.parametrize(
    ("output", "params", "named"),
    [
        ([5, 6], {"max_tokens": 2}, "2 tokens so far are all of it"),
        ([5, 6], {"max_tokens": 9, "stop_token_ids": (6,)}, "2 tokens so far are all of it"),
        ([5, VOCAB], {"max_tokens": 9}, f"output token 1 is {VOCAB}"),
        ([5, -1], {"max_tokens": 9}, "output token 1 is -1"),
    ],
)
def test_what_cannot_go_on_is_refused_and_not_queued(make_engine, output, params, named):
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=named):
        engine.add_request("r", [1, 2], SamplingParams(**params), output)
    assert not engine.has_unfinished()
