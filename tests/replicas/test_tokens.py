"""The demo model gives the same tokens whatever path they take through the engine."""

import random

import pytest
import torch

from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.sampling_params import SamplingParams

LENGTHS = (1, 2, 5, 17, 63, 64, 65, 100, 130, 200)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def make(demo_model):
    """Engines of the demo model on an arena whose every byte is 0xFF (NaN as a float)."""

    def build(extents=128, **options):
        bytes_per_extent = 1_050_000
        config = EngineConfig(
            str(demo_model),
            device="cpu",
            cache_memory_bytes=extents * bytes_per_extent,
            **options,
        )
        engine = build_engine(config)
        engine._executor._storage.buffer.fill_(0xFF)
        return engine

    return build


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return {f"p{n}": [rng.randrange(8192) for _ in range(n)] for n in LENGTHS}


@pytest.fixture(scope="module")
def params():
    """Greedy, filtered and plain draws in turn, the drawn ones with a seed of their own."""
    ways = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0})
    return {
        f"p{n}": SamplingParams(**ways[i % 3], seed=100 + i, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i, n in enumerate(LENGTHS)
    }


def run(engine, requests):
    """Serve (step to arrive at, name, prompt, params) and return each one's tokens."""
    tokens = {name: [] for _, name, _, _ in requests}
    pending, step = list(requests), 0
    while pending or engine.has_unfinished():
        for request in [r for r in pending if r[0] <= step]:
            pending.remove(request)
            engine.add_request(*request[1:])
        for out in engine.step():
            assert out.finish_reason != "error", out.error
            tokens[out.request_id] += out.token_ids
        engine.arena.check_integrity()
        step += 1
    assert engine.arena.free_extents == engine.arena.num_extents
    return tokens


@pytest.fixture(scope="module")
def alone(make, prompts, params):
    """Each prompt's tokens when it has a fresh engine's whole attention."""
    engine = make(max_num_batched_tokens=1000)
    return {name: run(engine, [(0, name, prompts[name], params[name])])[name] for name in prompts}


def together(prompts, params, gap=0):
    return [(i * gap, name, prompts[name], params[name]) for i, name in enumerate(prompts)]


@pytest.mark.parametrize("budget", [1, 7, 64, 1000])
def test_any_chunk_budget_and_batch_mix(make, prompts, params, alone, budget):
    # token by token a long prompt takes long, and shows no more than a short one
    asked = {name: p for name, p in prompts.items() if budget > 1 or len(p) <= 17}
    assert run(make(max_num_batched_tokens=budget), together(asked, params)) == {n: alone[n] for n in asked}


@pytest.mark.parametrize("gap", [1, 5])
def test_requests_that_join_late(make, prompts, params, alone, gap):
    assert run(make(max_num_batched_tokens=100), together(prompts, params, gap)) == alone


def test_one_sequence_at_a_time_reuses_the_slots_of_the_last(make, prompts, params, alone):
    engine = make(extents=2, max_num_batched_tokens=64)
    assert engine.max_num_seqs == 1
    for _ in range(2):
        assert run(engine, together(prompts, params)) == alone


def test_bf16_states(make, prompts, params, alone):
    """They take less of the arena, are rounded alike in any batch, and change few tokens."""
    narrow = make(max_num_batched_tokens=1000, state_dtype="bfloat16")
    assert narrow.arena.layout.unit.nbytes < 0.6 * make().arena.layout.unit.nbytes
    assert narrow._executor._storage.caches[0].recurrent.dtype == torch.bfloat16
    one_by_one = {name: run(narrow, [(0, name, prompts[name], params[name])])[name] for name in prompts}
    assert run(narrow, together(prompts, params)) == one_by_one
    # a prompt's first token is of the state before it is rounded
    assert all(one_by_one[name][0] == alone[name][0] for name in prompts)
    same = [a == b for name in prompts for a, b in zip(one_by_one[name], alone[name], strict=True)]
    assert sum(same) > 0.8 * len(same)


def test_preempted_and_resumed(make, params):
    """Three sequences that fit when they start, and no longer when each needs its eleventh page."""
    rng = random.Random(7)
    names = ("p1", "p2", "p5")
    requests = [(0, name, [rng.randrange(8192) for _ in range(150)], params[name]) for name in names]
    roomy = make(max_num_batched_tokens=256)
    wanted = {r[1]: run(roomy, [r])[r[1]] for r in requests}
    engine = make(extents=4, max_num_batched_tokens=256)
    assert run(engine, requests) == wanted
    assert engine.load().preemptions > 0


def test_evacuated(make, params):
    """A short answer leaves two page extents half empty; they are packed for the second newcomer's unit."""
    rng = random.Random(6)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    lengths = {"short": (0, 300, short), "p1": (0, 300, params["p1"]), "p2": (0, 5, params["p2"])}
    lengths |= {"p5": (6, 9, params["p5"]), "p17": (6, 20, params["p17"])}
    requests = [
        (at, name, [rng.randrange(8192) for _ in range(length)], how)
        for name, (at, length, how) in lengths.items()
    ]
    roomy = make(max_num_batched_tokens=1000)
    wanted = {r[1]: run(roomy, [r])[r[1]] for r in requests}
    engine = make(extents=5, max_num_batched_tokens=1000)
    storage = engine._executor._storage
    copy, moved = storage.copy, []

    def watch(copies):
        moved.extend(copies.pages)
        copy(copies)

    storage.copy = watch
    assert run(engine, requests) == wanted
    assert moved, "no page was evacuated: the test tests nothing"
    assert engine.load().preemptions == 0


def test_random_requests_with_cancellations_leave_the_arena_empty(make):
    """On a GPU the same with 2,000: see test_cuda."""
    rng = random.Random(4)
    engine = make(extents=12, max_num_batched_tokens=64, max_num_seqs=6)
    started, ended = 0, set()
    while started < 60 or engine.has_unfinished():
        for _ in range(rng.randrange(3)):
            if started < 60:
                prompt = [rng.randrange(8192) for _ in range(rng.choice((1, 5, 30, 100)))]
                how = SamplingParams(temperature=rng.choice((0, 0.9)), max_tokens=rng.randrange(1, 12))
                engine.add_request(f"r{started}", prompt, how)
                started += 1
        if rng.random() < 0.3:
            gone = f"r{rng.randrange(max(started, 1))}"
            engine.abort(gone)
            ended.add(gone)
        for out in engine.step():
            assert out.error is None, out.error
            if out.finished:
                ended.add(out.request_id)
    assert {f"r{i}" for i in range(60)} <= ended
    assert engine.arena.free_extents == engine.arena.num_extents


def test_a_poisoned_state_fails_its_request_alone(make, prompts, params, alone):
    """NaN in a unit: its request ends with an error; neighbours and the memory's next users are untouched."""
    engine = make(max_num_batched_tokens=1000)
    victim, error = "p65", None
    for name in prompts:
        engine.add_request(name, prompts[name], params[name])
    tokens = {name: [] for name in prompts}
    poisoned = False
    while engine.has_unfinished():
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
            error = out.error or error
            assert out.error is None or out.request_id == victim
        if not poisoned and len(tokens[victim]) == 10:
            layout = engine.arena.layout
            offset = layout.unit_offset(engine._requests[victim].unit_table[0])
            engine._executor._storage.buffer[offset : offset + layout.unit_bytes] = 0xFF
            poisoned = True
    assert error is not None and "NaN or Inf" in error
    assert all(tokens[name] == alone[name] for name in prompts if name != victim)
    assert run(engine, together(prompts, params)) == alone


def test_cancelled_neighbours_change_nothing(make, prompts, params, alone):
    engine = make(max_num_batched_tokens=100)
    names = list(prompts)
    for name in names:
        engine.add_request(name, prompts[name], params[name])
        engine.add_request(f"{name}-gone", prompts[name][::-1], params[name])
    tokens = {name: [] for name in names}
    step = 0
    while engine.has_unfinished():
        if step % 2 == 0 and step // 2 < len(names):
            engine.abort(f"{names[step // 2]}-gone")
        for out in engine.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
        step += 1
    assert {name: tokens[name] for name in names} == alone
    assert engine.arena.free_extents == engine.arena.num_extents


def test_greedy_tokens_are_transformers_own(make, demo_model):
    """64 tokens of each prompt, up to the first position where transformers' two best logits nearly tie."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    texts = [
        "def fibonacci(n):\n",
        "import os\nimport sys\n\n",
        "class Stack:\n    def __init__(self):\n",
        "# Copyright",
    ]
    engine = make(max_num_batched_tokens=64)
    compared = 0
    for i, text in enumerate(texts):
        prompt = tokenizer.encode(text)
        greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        got = run(engine, [(0, f"r{i}", prompt, greedy)])[f"r{i}"]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for at, token in enumerate(got):
            if best[at, 0] - best[at, 1] < 1e-3:
                break
            assert token == logits[at].argmax().item(), f"token {at} after {text!r}"
            compared += 1
    assert compared > 200
