"""The demo model gives the same tokens on one, two and four ranks, whatever path they take."""

import random
import signal

import pytest

from hybridserve.replicas.engine import local_ranks
from hybridserve.replicas.sampling_params import SamplingParams

LENGTHS = (1, 5, 64, 65, 130)
NEW_TOKENS = 10


@pytest.fixture(scope="module")
def requests():
    """(name, prompt, params): greedy, drawn, with every way to edit logits, and with its prompt scored."""
    rng = random.Random(5)
    ways = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.95, "logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "min_tokens": 4, "presence_penalty": 0.5},
        {"temperature": 0, "prompt_logprobs": 1},
    )
    return [
        (
            f"p{n}",
            [rng.randrange(8192) for _ in range(n)],
            SamplingParams(**how, seed=100 + n, max_tokens=NEW_TOKENS, ignore_eos=True),
        )
        for n, how in zip(LENGTHS, ways, strict=True)
    ]


def run(engine, requests):
    """Each request's tokens."""
    tokens = {name: [] for name, _, _ in requests}
    for request in requests:
        engine.add_request(*request)
    while engine.has_unfinished():
        collect(engine, tokens)
    assert engine.arena.free_extents == engine.arena.num_extents
    return tokens


def collect(engine, tokens):
    for out in engine.step():
        assert out.finish_reason != "error", out.error
        tokens[out.request_id] += out.token_ids


@pytest.fixture(scope="module")
def alone(make, requests):
    engine = make(1, max_num_batched_tokens=1000)
    return {request[0]: run(engine, [request])[request[0]] for request in requests}


@pytest.fixture(scope="module")
def two(make):
    return make(2, max_num_batched_tokens=100)


def test_two_ranks_batched_and_chunked(two, requests, alone):
    for _ in range(2):
        assert run(two, requests) == alone


def test_the_smallest_arena_decides_for_all(make, requests, alone, monkeypatch):
    """Another rank has room for 20 extents, and rank 0 for 64."""
    program = (
        "from dataclasses import replace\n"
        "from hybridserve.replicas.engine import rank, rank_main\n"
        "build = rank.build_shard\n"
        "def build_less(config, *args, **options):\n"
        "    return build(replace(config, cache_memory_bytes=20 * 525_000), *args, **options)\n"
        "rank.build_shard = build_less; rank_main.main()"
    )
    monkeypatch.setattr(local_ranks, "_PROGRAM", program)
    engine = make(2, max_num_batched_tokens=100)
    assert engine.arena.num_extents == 20
    assert run(engine, requests) == alone


def test_the_arena_of_a_rank_is_its_part(two):
    """Ranks lay out their memory in the same way, and each rank's part is smaller than the whole."""
    layout = two.arena.layout
    assert layout.extent_bytes <= 525_000
    assert two._executor.runner._storage.buffer.numel() == two.arena.num_extents * layout.extent_bytes


def test_an_interrupt_leaves_the_ranks_in_step(two, requests, alone, monkeypatch):
    """Ctrl-C when the others are at a step: rank 0 does its part, too, before it is interrupted."""
    runner = two._executor.runner
    submit, steps = runner.submit, []

    def interrupted(plan):
        steps.append(plan)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return submit(plan)

    monkeypatch.setattr(runner, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(two, requests)
    for name, _, _ in requests:
        two.abort(name)
    assert run(two, requests) == alone


def test_two_replicas_at_once_one_of_them_preempting(make, two, requests, alone):
    """Both step in turn, on one machine; in the other one three sequences outgrow the arena."""
    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    growing = [(f"g{i}", [rng.randrange(8192) for _ in range(155)], params) for i in range(3)]
    wanted = {request[0]: run(two, [request])[request[0]] for request in growing}
    small = make(2, extents=4, max_num_batched_tokens=256)
    tokens = {name: [] for name, _, _ in (*requests, *growing)}
    for request in requests:
        two.add_request(*request)
    for request in growing:
        small.add_request(*request)
    while two.has_unfinished() or small.has_unfinished():
        for engine in (two, small):
            if engine.has_unfinished():
                collect(engine, tokens)
    assert tokens == alone | wanted
    assert small.load().preemptions > 0


def test_four_ranks(make, requests, alone):
    engine = make(4, max_num_batched_tokens=1000)
    assert run(engine, requests) == alone
    engine.shutdown()
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        run(engine, requests)
