"""Requests through the engine's step loop, on an executor that remembers instead of computing."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridserve.replicas.engine.sizing import longest_sequence
from hybridserve.replicas.sampling_params import SamplingParams

from .conftest import MIXERS, VOCAB, next_token


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def drain(engine):
    """Step until idle; return the further tokens and the end of each request."""
    outputs = {}
    while engine.has_unfinished():
        for out in engine.step():
            entry = outputs.setdefault(out.request_id, {"first": out.first_index, "tokens": [], "end": None})
            assert out.first_index == entry["first"] + len(entry["tokens"]), "tokens out of order"
            entry["tokens"] += out.token_ids
            entry["end"] = out.finish_reason
        engine.arena.check_integrity()
    assert engine.arena.free_extents == engine.arena.num_extents
    assert engine.load().running == engine.load().waiting == 0
    return outputs


requests = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(0, 30), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.sampled_from(sorted(MIXERS)),
    arrivals=requests,
    budget=st.sampled_from([1, 7, 64, 100, 1000]),
    extents=st.integers(1, 6),
    max_num_seqs=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_every_request_ends_with_its_own_tokens(
    make_engine, mix, arrivals, budget, extents, max_num_seqs, seed
):
    """Random arrivals, lengths and cancellations on tiny arenas, whatever the chunks and the preemptions."""
    engine, _ = make_engine(mix, max(extents, 2), budget, max_num_seqs)
    longest = min(200, longest_sequence(engine.arena.layout, engine.arena.num_extents))
    engine.max_model_len = longest
    rng = random.Random(seed)
    pending, cancels, prompts, got, gone = [], {}, {}, {}, set()
    for i, (prompt_len, max_tokens, start, cancel) in enumerate(arrivals):
        prompt = [rng.randrange(VOCAB) for _ in range(min(prompt_len, longest - 1))]
        prompts[f"r{i}"] = (prompt, min(max_tokens, longest - len(prompt)))
        pending.append((start, f"r{i}", max_tokens))
        if cancel:
            cancels[f"r{i}"] = start + rng.randrange(30)
    step = 0
    while pending or engine.has_unfinished():
        for start, name, max_tokens in list(pending):
            if start <= step:
                engine.add_request(name, prompts[name][0], greedy(max_tokens))
                pending.remove((start, name, max_tokens))
        for name, at in cancels.items():
            if at == step and name not in gone:
                engine.abort(name)
                gone.add(name)
                pending = [p for p in pending if p[1] != name]
        for out in engine.step():
            assert out.request_id not in gone
            got.setdefault(out.request_id, []).extend(out.token_ids)
        engine.arena.check_integrity()
        step += 1
        assert step < 20_000, "no progress"
    assert engine.arena.free_extents == engine.arena.num_extents
    for name, (prompt, count) in prompts.items():
        if name in gone:
            assert got.get(name, []) == expected(prompt, len(got.get(name, [])))
        else:
            assert got[name] == expected(prompt, count)


def test_preemption_happens_and_changes_no_token(make_engine):
    engine, executor = make_engine("full only", extents=3, budget=64, max_num_seqs=8)
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(100 + 90 * (i % 2))] for i in range(12)}
    engine.max_model_len = 400
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(200))
    outputs = drain(engine)
    assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert outputs[name]["tokens"] == expected(prompt, 200)


def test_evacuation_happens_and_changes_no_token(make_engine):
    """Short answers leave page extents half empty; newcomers' units are had by packing them."""
    engine, executor = make_engine("small pages", extents=8, budget=2000, max_num_seqs=8, max_model_len=3000)
    prompts = {f"r{i}": [i] * 400 for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add_request(name, prompt, greedy(60 if i % 2 else 2))
    outputs = {name: [] for name in prompts}
    late = {f"late{i}": [i + 10] * 5 for i in range(4)}
    while engine.has_unfinished():
        for out in engine.step():
            outputs.setdefault(out.request_id, []).extend(out.token_ids)
        if engine.load().steps == 4:
            for name, prompt in late.items():
                engine.add_request(name, prompt, greedy(30))
    assert any(plan.copies.pages for plan in executor.plans)
    assert engine.load().preemptions == 0
    for name, prompt in (prompts | late).items():
        assert outputs[name] == expected(prompt, len(outputs[name])) and outputs[name]


def test_chunks_end_on_multiples_of_64_where_the_budget_allows(make_engine):
    engine, executor = make_engine("hybrid", budget=100, max_model_len=1000)
    engine.add_request("a", [1] * 10, greedy(50))
    engine.step()
    engine.add_request("b", [2] * 700, greedy(1))
    drain(engine)
    ends = [
        s.context_len + len(s.token_ids) for p in executor.plans for s in p.sequences if s.request_id == "b"
    ]
    assert ends[-1] == 700 and all(end % 64 == 0 for end in ends[:-1]) and len(ends) > 5


def test_decode_rows_come_first_and_go_on_while_a_prompt_is_prefilled(make_engine):
    engine, executor = make_engine("hybrid", budget=64, max_model_len=1000)
    engine.add_request("a", [1] * 10, greedy(30))
    engine.step()
    engine.add_request("b", [2] * 600, greedy(1))
    for _ in range(6):
        assert any(out.request_id == "a" for out in engine.step()), "a decode waited for a prefill"
    assert all(p.sequences[0].request_id == "a" and p.num_decodes == 1 for p in executor.plans[1:])
    assert all(len(p.sequences) == 2 for p in executor.plans[1:]), "the prefill waited for the decode"


def test_no_step_exceeds_its_budget_or_the_sequences(make_engine):
    engine, executor = make_engine("hybrid", extents=30, budget=50, max_num_seqs=3, max_model_len=1000)
    for i in range(10):
        engine.add_request(f"r{i}", [i] * (20 * i + 1), greedy(10))
    drain(engine)
    assert max(p.num_tokens for p in executor.plans) <= 50
    assert max(len(p.sequences) for p in executor.plans) <= 3


@pytest.mark.parametrize(
    ("params", "count", "end", "stop_token"),
    [
        ({"max_tokens": 3}, 3, "length", None),
        ({"max_tokens": None}, 190, "length", None),
        ({"max_tokens": 10_000}, 190, "length", None),
        ({"max_tokens": 50, "stop_token_ids": "third"}, 3, "stop", "third"),
        ({"max_tokens": 50, "eos": "third"}, 3, "stop", None),
        ({"max_tokens": 20, "eos": "third", "ignore_eos": True}, 20, "length", None),
    ],
)
def test_ends(make_engine, params, count, end, stop_token):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    third = expected(prompt, 3)[2]
    assert third not in expected(prompt, 2)
    params = {k: v for k, v in params.items() if k != "eos"} | (
        {"stop_token_ids": (third,)} if "stop_token_ids" in params else {}
    )
    eos = (third,) if end != "length" and not params.get("stop_token_ids") or params.get("ignore_eos") else ()
    engine, _ = make_engine("hybrid", eos=eos)
    engine.add_request("a", prompt, SamplingParams(temperature=0, **params))
    outs = []
    while engine.has_unfinished():
        outs += engine.step()
    assert len(outs) == count
    assert outs[-1].finish_reason == end
    assert outs[-1].stop_token_id == (third if stop_token else None)


def test_a_poisoned_request_fails_alone(make_engine):
    engine, executor = make_engine("hybrid")
    for name in ("a", "b", "c"):
        engine.add_request(name, [5, 6, 7], greedy(6))
    engine.step()
    executor.poisoned.add("b")
    outputs = drain(engine)
    assert outputs["b"]["end"] == "error"
    known = 6 if executor.overlaps else 5  # of those the first step drew, `step` may have returned none
    assert outputs["a"]["tokens"] == outputs["c"]["tokens"] == expected([5, 6, 7], 6)[-known:]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 200, {}, "prompt has 200 tokens, but the context holds 200"),
        ([1, VOCAB], {}, f"prompt token 1 is {VOCAB}, outside the vocabulary of {VOCAB}"),
        ([-1], {}, "prompt token 0 is -1"),
        ([True], {}, "prompt token 0 is True"),
        ([1], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds token {VOCAB}"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds token {VOCAB}"),
    ],
)
def test_bad_requests_are_refused_and_queue_nothing(make_engine, prompt, params, message):
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, SamplingParams(**params))
    assert not engine.has_unfinished()


def test_a_request_id_in_use_is_refused(make_engine):
    engine, _ = make_engine()
    engine.add_request("a", [1], SamplingParams())
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", [1], SamplingParams())
