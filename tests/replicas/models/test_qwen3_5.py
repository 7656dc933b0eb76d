"""`Qwen3_5ForCausalLM` against transformers, and against itself under other cuts of the same work."""

import pytest
import torch

# name: (layers, changes of the tiny config, save_pretrained's max_shard_size)
CONFIGS = {
    "ratio 1": ("llf", {"linear_num_key_heads": 4}, "1GB"),
    "ratio 2, sharded": ("lllflllf", {}, "20KB"),
    "ratio 4, one key head": ("lfl", {"linear_num_key_heads": 1}, "1GB"),
    "key and value dims differ": ("llf", {"linear_key_head_dim": 12, "linear_value_head_dim": 20}, "1GB"),
    "odd widths": (
        "lfl",
        {"hidden_size": 37, "intermediate_size": 51, "vocab_size": 101, "linear_value_head_dim": 7},
        "8KB",
    ),
    "tied": ("lfl", {"tie_word_embeddings": True}, "8KB"),
    "one linear layer": ("l", {}, "1GB"),
    "one full layer": ("f", {}, "1GB"),
    "all linear, tied": ("lll", {"tie_word_embeddings": True}, "1GB"),
    "all full, one KV head": ("fff", {"num_key_value_heads": 1}, "1GB"),
    "as many KV heads as heads": ("lf", {"num_key_value_heads": 4}, "1GB"),
    "biases": ("lf", {"attention_bias": True}, "1GB"),
    "convolution of 2": ("lf", {"linear_conv_kernel_dim": 2}, "1GB"),
    "all dims rotate": ("f", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, "1GB"),
}


@pytest.mark.parametrize("length", [1, 2, 3, 15, 63, 64, 65, 257, 1000, 3000])
def test_demo_model_logits(kit, demo_path, demo_reference, length) -> None:
    loaded = kit.load(demo_path, max_len=length)
    tokens = kit.random_tokens(length, 8192, seed=length)
    kit.assert_close(loaded.run([(0, tokens, 0)]), kit.reference_logits(demo_reference, tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_random_model_logits(kit, tmp_path, name) -> None:
    layers, changes, shard_size = CONFIGS[name]
    if name == "all dims rotate":
        changes = {"rope_parameters": {**changes["rope_parameters"], "partial_rotary_factor": 1.0}}
    reference = kit.save_random_model(tmp_path, layers, max_shard_size=shard_size, **changes)
    assert shard_size == "1GB" or (tmp_path / "model.safetensors.index.json").exists()
    vocab_size = reference.config.vocab_size
    for length in (1, 2, 3, 15, 63, 64, 65, 257):
        loaded = kit.load(tmp_path, max_len=length)
        tokens = kit.random_tokens(length, vocab_size, seed=length)
        kit.assert_close(loaded.run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


def test_prefill_cut_at_every_position(kit, demo_path) -> None:
    tokens = kit.random_tokens(70, 8192)
    loaded = kit.load(demo_path, num_sequences=2, max_len=70)
    whole = loaded.run([(0, tokens, 0)])
    for cut in range(1, 70):
        first = loaded.run([(1, tokens[:cut], 0)])
        second = loaded.run([(1, tokens[cut:], cut)])
        kit.assert_close(torch.cat([first, second]), whole)


def test_decode_equals_prefill(kit, demo_path) -> None:
    tokens = kit.random_tokens(90, 8192)
    loaded = kit.load(demo_path, num_sequences=2, max_len=90)
    whole = loaded.run([(0, tokens, 0)])
    loaded.run([(1, tokens[:65], 0)])
    steps = [loaded.run([(1, [tokens[p]], p)], num_decodes=1) for p in range(65, 90)]
    kit.assert_close(torch.cat(steps), whole[65:])


@pytest.mark.parametrize("name", ["ratio 2, sharded", "odd widths", "one linear layer", "one full layer"])
def test_ragged_batches_equal_single_sequences(kit, tmp_path, name) -> None:
    """Five sequences of other lengths, prefilled together, decoded together, a sixth joining them midway."""
    layers, changes, _ = CONFIGS[name]
    vocab_size = kit.save_random_model(tmp_path, layers, **changes).config.vocab_size
    lengths = [1, 3, 17, 64, 100, 70]
    prompts = [kit.random_tokens(n + 8, vocab_size, seed=n) for n in lengths]
    alone = []
    for s, prompt in enumerate(prompts):
        alone.append(kit.load(tmp_path, num_sequences=s + 1, max_len=128).run([(s, prompt, 0)]))
    loaded = kit.load(tmp_path, num_sequences=6, max_len=128)
    first = loaded.run([(s, prompts[s][: lengths[s]], 0) for s in range(5)]).split(lengths[:5])
    for s in range(5):
        kit.assert_close(first[s], alone[s][: lengths[s]])
    for step in range(8):
        work = [(s, [prompts[s][lengths[s] + step]], lengths[s] + step) for s in (4, 2, 0, 1, 3)]
        # the sixth prompt comes in two chunks beside the others' decode rows
        chunk = {2: (0, 30), 3: (30, 78)}.get(step)
        joined = [(5, prompts[5][chunk[0] : chunk[1]], chunk[0])] if chunk else []
        logits = loaded.run(work + joined, num_decodes=5)
        expected = [alone[s][[lengths[s] + step]] for s in (4, 2, 0, 1, 3)]
        kit.assert_close(logits, torch.cat(expected + [alone[5][chunk[0] : chunk[1]]] if chunk else expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kit, demo_path, demo_reference, dtype) -> None:
    """Our half-precision model strays from fp32 no further than twice what transformers' does."""
    tokens = kit.random_tokens(80, 8192)
    exact = kit.reference_logits(demo_reference, tokens)
    loaded = kit.load(demo_path, dtype=dtype, max_len=96)
    ours = torch.cat(
        [loaded.run([(0, tokens[:70], 0)])]
        + [loaded.run([(0, [tokens[p]], p)], num_decodes=1) for p in range(70, 80)]
    )
    assert ours.dtype == torch.float32
    half = type(demo_reference)(demo_reference.config)
    half.load_state_dict(demo_reference.state_dict())
    theirs = kit.reference_logits(half.to(dtype).eval(), tokens).float()
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_other_states_are_left_alone(kit, demo_path) -> None:
    """A step writes the units and pages of its own sequences and no other byte."""
    loaded = kit.load(demo_path, num_sequences=3, max_len=64)
    loaded.run([(1, kit.random_tokens(40, 8192), 0)])
    units = loaded.caches.buffer[-3 * loaded.caches.unit :].view(3, -1)
    assert (units[0] == 0xFF).all() and (units[2] == 0xFF).all()
    assert not (units[1] == 0xFF).all()


def test_greedy_continuation_equals_transformers(kit, demo_path, demo_reference) -> None:
    """64 tokens, wherever transformers' own choice has a margin of 1e-3."""
    tokens = kit.random_tokens(20, 8192, seed=5)
    loaded = kit.load(demo_path, max_len=96)
    logits = loaded.run([(0, tokens, 0)])[-1]
    for _ in range(64):
        tokens.append(int(logits.argmax()))
        logits = loaded.run([(0, tokens[-1:], len(tokens) - 1)], num_decodes=1)[-1]
    theirs = kit.reference_logits(demo_reference, tokens)[19:-1]
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.sum() > 32
    assert torch.equal(theirs.argmax(-1)[clear], torch.tensor(tokens[20:])[clear])


def test_a_shortened_model_is_one_of_fewer_layers(kit, demo_path) -> None:
    """And is whole again behind the block, however that ends."""
    loaded = kit.load(demo_path)
    model, config = loaded.model, loaded.caches.config
    names = list(dict(model.named_parameters()))
    first, second = config.distinct_layers
    assert config.mixers[first] != config.mixers[second] and first == 0
    every = list(model.model.layers)
    with pytest.raises(RuntimeError, match="out"), model.shortened(config.distinct_layers):
        assert list(model.model.layers) == [every[first], every[second]]
        raise RuntimeError("out")
    assert list(model.model.layers) == every
    assert list(dict(model.named_parameters())) == names
    tokens = kit.random_tokens(20, 8192)
    with model.shortened(range(config.num_layers)):
        whole = loaded.run([(0, tokens, 0)])
    kit.assert_close(loaded.run([(0, tokens, 0)]), whole)
