"""Qwen3.5-MoE and Qwen3-Next against transformers, and how their checkpoints are read."""

import json
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridserve.parallel.group import SINGLE
from hybridserve.parallel.weights.loader import checkpoint_targets, load_checkpoint
from hybridserve.parallel.weights.parameter import ShardedParameter
from hybridserve.replicas.models.config import load_model_config, parse_model_config
from hybridserve.replicas.models.footprint import measure_footprint
from hybridserve.replicas.models.registry import build_model, load_model
from hybridserve.replicas.models.specs import MoESpec

CPU = torch.device("cpu")
KINDS = ["qwen3_5_moe", "qwen3_next"]
# name: (kind, layers, changes of the tiny config)
CONFIGS = {
    "moe": ("qwen3_5_moe", "llf", {}),
    "moe, all experts": ("qwen3_5_moe", "lf", {"num_experts": 5, "num_experts_per_tok": 5}),
    "moe, top 1": ("qwen3_5_moe", "lf", {"num_experts_per_tok": 1, "moe_intermediate_size": 24}),
    "next": ("qwen3_next", "llf", {}),
    "next, ratio 1": ("qwen3_next", "lf", {"linear_num_key_heads": 4}),
    "next, ratio 4, dims differ": (
        "qwen3_next",
        "lf",
        {"linear_num_key_heads": 1, "linear_key_head_dim": 12, "linear_value_head_dim": 20},
    ),
    "next, not normalised": ("qwen3_next", "lf", {"norm_topk_prob": False}),
    "next, dense layers": ("qwen3_next", "lflf", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "next, all dense": ("qwen3_next", "lf", {"mlp_only_layers": [0, 1]}),
}


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one checkpoint with the experts of each layer as gate_up_proj and down_proj."""
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    others = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            others[name] = tensor
        else:
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor
    for name, own in experts.items():
        ordered = [own[e] for e in range(len(own))]
        gate_up = [torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered]
        others[f"{name}.gate_up_proj"] = torch.stack(gate_up)
        others[f"{name}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return others


def save_stacked(folder) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stack_experts(tensors), folder / "model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(kit, tmp_path, name) -> None:
    kind, layers, changes = CONFIGS[name]
    reference = kit.save_random_model(tmp_path, layers, kind=kind, **changes)
    for length in (1, 2, 65):
        loaded = kit.load(tmp_path, max_len=length)
        tokens = kit.random_tokens(length, 97, seed=length)
        kit.assert_close(loaded.run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_and_greedy_tokens(kit, tmp_path, kind) -> None:
    """A prompt in two chunks, then 24 tokens, each the best of ours; transformers sees the whole at once."""
    reference = kit.save_random_model(tmp_path, "lf", kind=kind)
    tokens = kit.random_tokens(20, 97, seed=5)
    loaded = kit.load(tmp_path, max_len=64)
    rows = [loaded.run([(0, tokens[:7], 0)]), loaded.run([(0, tokens[7:], 7)])]
    for _ in range(24):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(loaded.run([(0, tokens[-1:], len(tokens) - 1)], num_decodes=1))
    theirs = kit.reference_logits(reference, tokens)
    kit.assert_close(torch.cat(rows), theirs)
    best = theirs[19:-1].topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert clear.sum() > 12
    assert (best.indices[:, 0] == torch.tensor(tokens[20:]))[clear].all()


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_and_single_experts_are_the_same_model(kit, tmp_path, kind) -> None:
    kit.save_random_model(tmp_path, "lf", kind=kind)
    tokens = kit.random_tokens(30, 97)
    assert not load_model_config(tmp_path).moe.stacked
    single = kit.load(tmp_path).run([(0, tokens, 0)])
    save_stacked(tmp_path)
    assert load_model_config(tmp_path).moe.stacked
    assert torch.equal(kit.load(tmp_path).run([(0, tokens, 0)]), single)


def test_the_wrappers_checkpoint(kit, tmp_path) -> None:
    """Stacked experts under `model.language_model.`, beside vision and MTP tensors."""
    reference = kit.save_random_model(tmp_path, "lf", kind="qwen3_5_moe")
    save_stacked(tmp_path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    for name in ("model.visual.a.weight", "mtp.layers.0.mlp.experts.gate_up_proj"):
        tensors[name] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    tokens = kit.random_tokens(20, 97)
    kit.assert_close(kit.load(tmp_path).run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_loaded_once(kit, tmp_path, monkeypatch, kind, stacked) -> None:
    kit.save_random_model(tmp_path, "lf", kind=kind)
    if stacked:
        save_stacked(tmp_path)
    model = build_model(load_model_config(tmp_path), SINGLE, torch.float32, CPU)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    loads: Counter[str] = Counter()
    unwrapped = ShardedParameter.weight_loader

    def counted(self: ShardedParameter, source, section: str) -> None:
        before = self.detach().isnan()
        unwrapped(self, source, section)
        written = before & ~self.detach().isnan()
        other = self.numel() // self.shape[self.dim]
        assert written.sum() == self.sections[section].count * other
        loads[source.name] += 1

    monkeypatch.setattr(ShardedParameter, "weight_loader", counted)
    targets = checkpoint_targets(model, model.checkpoint_name)
    # one thread: another's elements must not be counted as this one's
    report = load_checkpoint(tmp_path, targets, model.skip_reason, None, 1)
    assert loads == Counter(list(load_file(tmp_path / "model.safetensors"))) and report.skipped == {}
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_a_missing_expert_is_named(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "lf", kind="qwen3_next")
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks tensor {name}"):
        kit.load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights(kit, tmp_path, kind) -> None:
    kit.save_random_model(tmp_path, "lf", kind=kind)
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(tmp_path)
    model = load_model(tmp_path, config, SINGLE, torch.float32, CPU, "dummy", 3)
    loaded = kit.loaded(model, kit.caches(config, max_len=64))
    logits = loaded.run([(0, kit.random_tokens(40, 97), 0)])
    assert logits.isfinite().all() and 0.01 < logits.std() < 100
    # variance 1 / fan-in, however the experts are stored
    assert 0.5 < model.model.layers[0].mlp.w13.std() * 32**0.5 < 2


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(kit, tmp_path, name) -> None:
    kind, layers, changes = CONFIGS[name]
    reference = kit.save_random_model(tmp_path, layers, kind=kind, **changes)
    config = load_model_config(tmp_path)
    assert measure_footprint(config, "float32").parameters == reference.num_parameters()
    model = build_model(config, SINGLE, torch.float32, CPU)
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()


def values(kit, tmp_path, kind: str) -> dict[str, object]:
    kit.save_random_model(tmp_path, "lf", kind=kind)
    return json.loads((tmp_path / "config.json").read_text())


def test_specs(kit, tmp_path) -> None:
    """Without a checkpoint, a model type's usual form of experts."""
    own = values(kit, tmp_path, "qwen3_5_moe")
    config = parse_model_config(own, "config.json")
    assert config.moe == MoESpec(8, 3, 24) and config.intermediate_size == 0
    assert config.moe_of(0) == config.moe_of(1) == config.moe
    own = {**values(kit, tmp_path, "qwen3_next"), "mlp_only_layers": [0], "norm_topk_prob": False}
    config = parse_model_config(own, "config.json")
    assert config.moe == MoESpec(8, 3, 24, False, False, (0,)) and config.intermediate_size == 48
    assert config.moe_of(0) is None and config.moe_of(1) == config.moe
    assert config.mixers[0].interleaved
    # dense, with experts, and with full attention where there is some
    kinds = [(config.mixers[i], config.moe_of(i)) for i in range(config.num_layers)]
    assert config.distinct_layers[:2] == (0, 1)
    assert [kinds[i] for i in config.distinct_layers] == list(dict.fromkeys(kinds))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* more than num_experts 8"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 48}, "size 48 .* not supported.* 24"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob .* must be true, got False"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, "mlp_only_layers .* must be empty, got"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step .* must be 1, got 2"),
        ("qwen3_5_moe", {"num_experts": 5000}, "num_experts .* at most 1024, got 5000"),
        ("qwen3_next", {"mlp_only_layers": [2]}, "names layer 2, but num_hidden_layers is 2"),
        ("qwen3_next", {"mlp_only_layers": 1}, "mlp_only_layers .* a list of layer numbers, got 1"),
        ("qwen3_next", {"moe_intermediate_size": None}, "lacks the key moe_intermediate_size"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step .* positive integer, got 0"),
    ],
)
def test_refusals(kit, tmp_path, kind, changes, message) -> None:
    own = {**values(kit, tmp_path, kind), **changes}
    with pytest.raises(ValueError, match=message):
        parse_model_config(own, "config.json")
