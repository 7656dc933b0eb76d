"""`load_model`: strict loading of a model's checkpoint, every tensor and every element once."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridserve.parallel.group import SINGLE
from hybridserve.parallel.weights.loader import checkpoint_targets, load_checkpoint
from hybridserve.parallel.weights.parameter import ShardedParameter
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.registry import build_model, load_model

CPU = torch.device("cpu")
PREFIX = "model.layers.1.self_attn."


def load(path, **options):
    return load_model(path, load_model_config(path), SINGLE, torch.float32, CPU, **options)


def read_tensors(folder) -> dict[str, torch.Tensor]:
    """Copies, since what `load_file` returns is mapped from a file that tests write over."""
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def rewrite(folder, change) -> None:
    """Apply `change` to the dict of tensors of a single-file checkpoint."""
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rewrite_config(folder, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_every_tensor_and_every_element_is_loaded_once(kit, tmp_path, monkeypatch) -> None:
    kit.save_random_model(tmp_path, "lfl", max_shard_size="10KB")
    model = build_model(load_model_config(tmp_path), SINGLE, torch.float32, CPU)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    loads: Counter[str] = Counter()
    unwrapped = ShardedParameter.weight_loader

    def counted(self: ShardedParameter, source, section: str) -> None:
        before = self.detach().isnan()
        unwrapped(self, source, section)
        written = before & ~self.detach().isnan()
        # the new elements are as many as this section has: none was written before
        other = self.numel() // self.shape[self.dim]
        assert written.sum() == self.sections[section].count * other
        loads[source.name] += 1

    monkeypatch.setattr(ShardedParameter, "weight_loader", counted)
    targets = checkpoint_targets(model, model.checkpoint_name)
    seen: list[tuple[int, int]] = []
    # one thread: another's elements must not be counted as this one's
    report = load_checkpoint(tmp_path, targets, model.skip_reason, lambda *at: seen.append(at), 1)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert loads == Counter(list(names)) and report.num_tensors == len(names) and report.skipped == {}
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert len(seen) == len(names) and seen[-1] == (report.num_bytes, report.num_bytes)
    assert seen == sorted(seen)


def test_the_progress_is_reported(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "lf")
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] > 0


def test_vision_mtp_and_a_tied_head_are_skipped_and_counted(kit, tmp_path, caplog) -> None:
    reference = kit.save_random_model(tmp_path, "lf", tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in ("model.visual.a.weight", "mtp.layers.0.b.weight", "model.mtp.c.weight"):
            tensors[name] = torch.zeros(2)

    rewrite(tmp_path, add)
    with caplog.at_level("INFO"):
        loaded = kit.load(tmp_path)
    assert "1 tied head" in caplog.text and "1 vision" in caplog.text and "2 mtp" in caplog.text
    tokens = kit.random_tokens(20, 97)
    kit.assert_close(loaded.run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


def test_a_head_that_is_not_there_is_tied(kit, tmp_path) -> None:
    reference = kit.save_random_model(tmp_path, "lf", tie_word_embeddings=True)
    rewrite_config(tmp_path, tie_word_embeddings=False)
    tokens = kit.random_tokens(20, 97)
    kit.assert_close(kit.load(tmp_path).run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


def test_weights_under_the_wrappers_prefix(kit, tmp_path) -> None:
    """A wrapped config with `model.language_model.` names, and stray files beside the index."""
    reference = kit.save_random_model(tmp_path, "lf")
    tensors = read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a stray file")
    (tmp_path / "stray.safetensors").write_bytes(b"another")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(renamed, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    tokens = kit.random_tokens(20, 97)
    kit.assert_close(kit.load(tmp_path).run([(0, tokens, 0)]), kit.reference_logits(reference, tokens))


def test_missing_tensor(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "lf")
    rewrite(tmp_path, lambda tensors: tensors.pop(PREFIX + "k_proj.weight"))
    with pytest.raises(ValueError, match=f"lacks tensor {PREFIX}k_proj.weight"):
        load(tmp_path)


def test_extra_tensor(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "lf")
    rewrite(tmp_path, lambda tensors: tensors.update({PREFIX + "k_proj.bias": torch.zeros(32)}))
    with pytest.raises(
        ValueError, match=rf"holds tensor {PREFIX}k_proj.bias \(the first in model.safetensors"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (PREFIX + "k_proj.weight", (31, 32)),
        (PREFIX + "o_proj.weight", (32, 63)),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 4)),
        ("model.layers.0.linear_attn.A_log", (1, 4)),
        ("model.norm.weight", (33,)),
    ],
)
def test_misshapen_tensor(kit, tmp_path, name, shape) -> None:
    kit.save_random_model(tmp_path, "lf")
    was = tuple(read_tensors(tmp_path)[name].shape)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert name in message and "model.safetensors" in message
    assert str(list(shape)) in message and str(list(was)) in message


def test_quantised_tensor(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "lf")
    name = PREFIX + "k_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=f"tensor {name} in model.safetensors is stored as F8_E4M3"):
        load(tmp_path)


def test_dummy_weights(kit, tmp_path) -> None:
    """Deterministic, different for another seed, and sane: finite logits that depend on the prompt."""
    kit.save_random_model(tmp_path, "lf")
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(tmp_path)
    logits = []
    for seed, prompt in ((3, 0), (3, 0), (4, 0), (3, 1)):
        model = load_model(tmp_path, config, SINGLE, torch.float32, CPU, "dummy", seed)
        loaded = kit.loaded(model, kit.caches(config, max_len=64))
        logits.append(loaded.run([(0, kit.random_tokens(40, 97, seed=prompt), 0)]))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[3])
    assert all(x.isfinite().all() for x in logits) and 0.01 < logits[0].std() < 100
    decay = model.model.layers[0].linear_attn.A_log
    assert (decay >= 0).all() and (decay <= 2.8).all()


def test_a_dtype_without_support(kit, tmp_path) -> None:
    kit.save_random_model(tmp_path, "l")
    with pytest.raises(
        ValueError, match="dtype must be one of float32, bfloat16, float16, got torch.float64"
    ):
        build_model(load_model_config(tmp_path), SINGLE, torch.float64, CPU)
