"""The engine on a GPU against the CPU's, and what only a GPU's engine has: graphs, compilation."""

import random

import pytest
import torch

from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.runner.batching import Batcher
from hybridserve.replicas.runner.piece_graphs import PieceGraphs
from hybridserve.replicas.runner.sampling import SampleArrays
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
LENGTHS = (1, 2, 17, 64, 65, 130, 300, 700)
NEW_TOKENS = 40
# two logits closer than this may change places between dtypes and devices
NOISE = {"float32": 1e-3, "bfloat16": 0.25}


def build(demo_model, device, dtype="float32", **options):
    options = {"max_num_seqs": 16, "cache_memory_bytes": 512 << 20, "max_num_batched_tokens": 512} | options
    engine = build_engine(EngineConfig(str(demo_model), device=device, dtype=dtype, **options))
    engine._executor._storage.buffer.fill_(0xFF)
    return engine


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return {f"p{n}": [rng.randrange(8192) for _ in range(n)] for n in LENGTHS}


def greedy(**options):
    return SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, **options)


def run(engine, prompts, params):
    """name -> (tokens, margin between the two likeliest at each, where logprobs were asked for)."""
    found = {name: ([], []) for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    while engine.has_unfinished():
        for out in engine.step():
            assert out.error is None, out.error
            tokens, margins = found[out.request_id]
            tokens += out.token_ids
            margins += [lp.top_logprobs[0] - lp.top_logprobs[1] for lp in out.logprobs]
    assert engine.arena.free_extents == engine.arena.num_extents
    return found


def assert_same_where_sure(got, wanted, noise):
    """Equal up to the first token whose margin is noise; returns how many tokens were compared."""
    compared = 0
    for name, (tokens, margins) in wanted.items():
        for at, (a, b) in enumerate(zip(got[name][0], tokens, strict=True)):
            if a != b:
                assert margins[at] < noise, f"{name}: token {at} differs with a margin of {margins[at]}"
                break
            compared += 1
    return compared


@pytest.fixture(scope="module")
def on_cpu(demo_model, prompts):
    return run(build(demo_model, "cpu"), prompts, greedy(logprobs=2))


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_greedy_tokens_are_the_cpu_engines(demo_model, prompts, on_cpu, dtype, state_dtype, enforce_eager):
    engine = build(demo_model, "cuda", dtype, state_dtype=state_dtype, enforce_eager=enforce_eager)
    got = run(engine, prompts, greedy())
    compared = assert_same_where_sure(got, on_cpu, NOISE[dtype])
    assert compared > len(LENGTHS) * NEW_TOKENS * (0.95 if dtype == "float32" else 0.6)


def test_a_graph_gives_the_bits_of_the_same_step_without_one(demo_model):
    """Of one padded shape; and padding touches nothing but its own memory."""
    engine = build(demo_model, "cuda", "bfloat16")
    for at in range(3):
        engine.add_request(f"r{at}", list(range(1, 20 + at)), greedy())
    for _ in range(4):
        engine.step()
    engine._collect()
    runner = engine._executor
    graphs, storage = runner._graphs, runner._storage
    plan = engine._scheduler.schedule()
    assert plan.num_decodes == 3
    arrays = Batcher(storage.layout).arrays(plan, runner._draw_rows)
    samples = SampleArrays.of([s.sample for s in plan.sequences], engine.model_config.vocab_size)
    before, drawn = storage.buffer.clone(), graphs._drawn.clone()
    results = []
    for launch in (graphs._models[4].replay, lambda: graphs._step_model(4)):
        storage.buffer.copy_(before)
        graphs._drawn.copy_(drawn)
        with torch.inference_mode():
            graphs.stage(arrays, samples, 4)
            launch()
        results.append((graphs._logits[:3].clone(), storage.buffer.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    changed = (results[0][1] != before).nonzero().flatten()
    layout = storage.layout
    own = torch.zeros_like(before, dtype=torch.bool)
    for sequence in plan.sequences:
        unit = layout.unit_offset(sequence.unit)
        own[unit : unit + layout.unit_bytes] = True
        for page in sequence.block_table:
            own[page * layout.page.slab_bytes :][: layout.page.nbytes] = True
    assert own[changed].all()


def test_launches_said_again_give_the_bits_of_each_layers_own(demo_model, monkeypatch):
    """Of chunks that begin and that go on, with decode rows before them and without."""
    engine = build(demo_model, "cuda", "bfloat16", max_num_batched_tokens=256)
    runner = engine._executor
    pieces, buffer, seen = runner._pieces, runner._storage.buffer, set()
    forward = pieces.forward

    def both_ways(batch, caches):
        before = buffer.clone()
        with monkeypatch.context() as each:
            each.setattr(PieceGraphs, "_recorded", lambda self, *args: self._meet(*args))
            own = forward(batch, caches).clone()
        after = buffer.clone()
        buffer.copy_(before)
        again = forward(batch, caches)
        assert torch.equal(again, own)
        assert torch.equal(buffer, after)
        chunks = batch.context_lens[batch.num_decodes :]
        seen.add((batch.num_decodes > 0, any(chunks), len(chunks) > 1))
        return again

    pieces.forward = both_ways
    for at, length in enumerate((70, 5, 600, 33, 1, 40, 500)):
        engine.add_request(f"r{at}", list(range(1, 1 + length)), greedy())
        engine.step()
    while engine.has_unfinished():
        engine.step()
    assert {rows for rows, _, _ in seen} == {known for _, known, _ in seen} == {True, False}
    assert any(several for _, _, several in seen)


def test_nothing_is_compiled_after_the_start(demo_model):
    from hybridserve.kernels.compilation import counted_compilations

    rng = random.Random(3)
    engine = build(demo_model, "cuda", "bfloat16", max_num_seqs=24)
    ways = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.05, "logprobs": 3},
        {"temperature": 0, "presence_penalty": 0.3, "logit_bias": {5: 1.0}, "min_tokens": 3},
        {"temperature": 0, "prompt_logprobs": 2},
    )
    with counted_compilations() as count:
        for at in range(200):
            prompt = [
                rng.randrange(8192) for _ in range(rng.choice((1, 2, 15, 16, 17, 63, 64, 200, 513, 900)))
            ]
            params = SamplingParams(max_tokens=rng.randrange(3, 20), seed=at, **rng.choice(ways))
            engine.add_request(f"r{at}", prompt, params)
            for _ in range(rng.randrange(3)):
                engine.step()
        while engine.has_unfinished():
            engine.step()
        assert count() == 0


WIDE_HEADS = """
model_type: qwen3_5_text
vocab_size: 8192
hidden_size: 512
intermediate_size: 1024
num_hidden_layers: 2
full_attention_interval: 2
num_attention_heads: 4
num_key_value_heads: 2
head_dim: 128
attn_output_gate: true
rope_parameters: {rope_type: default, rope_theta: 10000000, partial_rotary_factor: 0.25}
linear_num_key_heads: 2
linear_num_value_heads: 4
linear_key_head_dim: 128
linear_value_head_dim: 128
linear_conv_kernel_dim: 4
hidden_act: silu
rms_norm_eps: 1e-6
tie_word_embeddings: false
max_position_embeddings: 65536
eos_token_id: 0
dtype: bfloat16
"""
"""Heads that cuDNN attends."""


@pytest.mark.parametrize("max_model_len", [11800, 32768])
def test_nothing_is_compiled_for_a_long_context(tmp_path, max_model_len):
    """Of which cuDNN attends pieces, with and without a rest, and the rest of a step goes by Triton."""
    from hybridserve.kernels.compilation import counted_compilations

    shape = tmp_path / "wide_heads.yaml"
    shape.write_text(WIDE_HEADS)
    engine = build(
        shape,
        "cuda",
        "bfloat16",
        load_format="dummy",
        max_model_len=max_model_len,
        max_num_batched_tokens=8192,
    )
    lengths = [n for n in (8200, 9000, 11790, 20000, 24640, 31000, 32700) if n < max_model_len]
    with counted_compilations() as count:
        for at, length in enumerate(lengths):
            # alone
            engine.add_request(f"a{at}", [5] * length, SamplingParams(max_tokens=2, ignore_eos=True))
            while engine.has_unfinished():
                assert all(out.error is None for out in engine.step())
        for at, length in enumerate((300, *lengths, 40, 5000)):
            engine.add_request(f"b{at}", [7] * length, SamplingParams(max_tokens=9, ignore_eos=True))
        while engine.has_unfinished():
            assert all(out.error is None for out in engine.step())
        assert count() == 0


def test_2000_random_requests_leave_the_arena_empty(demo_model):
    rng = random.Random(4)
    engine = build(demo_model, "cuda", "bfloat16", max_num_seqs=32, cache_memory_bytes=48 << 20)
    started, ended, step = 0, set(), 0
    while started < 2000 or engine.has_unfinished():
        for _ in range(rng.randrange(8)):
            if started < 2000 and engine.load().waiting < 64:
                prompt = [rng.randrange(8192) for _ in range(rng.choice((1, 5, 30, 100, 400)))]
                way = {"temperature": rng.choice((0, 0.9)), "top_p": rng.choice((1.0, 0.8))}
                engine.add_request(
                    f"r{started}", prompt, SamplingParams(max_tokens=rng.randrange(1, 40), **way)
                )
                started += 1
        if rng.random() < 0.3:
            gone = f"r{rng.randrange(max(started, 1))}"
            engine.abort(gone)
            ended.add(gone)
        for out in engine.step():
            assert out.error is None, out.error
            if out.finished:
                ended.add(out.request_id)
        step += 1
        assert step < 100_000
    assert {f"r{i}" for i in range(2000)} <= ended
    engine.arena.check_integrity()
    assert engine.arena.free_extents == engine.arena.num_extents


def test_a_poisoned_state_fails_its_request_alone(demo_model, prompts):
    """NaN in a unit: its request ends with an error; neighbours and its memory's next users are untouched."""
    engine = build(demo_model, "cuda", "float32")
    clean = run(engine, prompts, greedy())
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy())
    victim = "p65"
    tokens, error = {name: [] for name in prompts}, None
    poisoned = False
    while engine.has_unfinished():
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
            if out.error is not None:
                assert out.request_id == victim
                error = out.error
        if not poisoned and len(tokens[victim]) == 10:
            unit = engine._requests[victim].unit_table[0]
            offset = engine.arena.layout.unit_offset(unit)
            engine._executor._storage.buffer[offset : offset + engine.arena.layout.unit_bytes] = 0xFF
            poisoned = True
    assert error is not None and "NaN or Inf" in error
    for name in prompts:
        if name != victim:
            assert tokens[name] == clean[name][0], name
    assert {name: row[0] for name, row in run(engine, prompts, greedy()).items()} == {
        name: row[0] for name, row in clean.items()
    }


def test_a_row_may_be_drawn_again(demo_model):
    """What a draw depends on is in its spec: the same one gives the same token in a graph and outside."""
    engine = build(demo_model, "cuda", "float32")
    params = SamplingParams(temperature=0.9, top_p=0.8, seed=11, max_tokens=20, ignore_eos=True)
    prompt = {"a": [3, 1, 4, 1, 5]}
    in_graphs = run(engine, prompt, params)["a"][0]
    eager = run(build(demo_model, "cuda", "float32", enforce_eager=True), prompt, params)["a"][0]
    assert in_graphs == eager
