"""What a shard holds: specs, which sizes work, and how much of a checkpoint is read."""

import json
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.linear import FusedColumnLinear
from hybridserve.parallel.weights import staging
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.footprint import measure_footprint
from hybridserve.replicas.models.gated_delta_net import GatedDeltaNet
from hybridserve.replicas.models.registry import build_model, load_model
from hybridserve.replicas.models.sharding import shard_mixer, with_splits
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec

CPU = torch.device("cpu")


def shard_of(rank: int, size: int) -> TensorParallelGroup:
    """A rank without others: building and loading a model talks to nobody."""
    return TensorParallelGroup(rank, size, backend=object())


def test_specs_of_a_shard() -> None:
    linear, full = LinearAttentionSpec(16, 48, 128, 128, 4), FullAttentionSpec(24, 4, 256, 64, 1e7)
    assert shard_mixer(linear, 1, 2) == LinearAttentionSpec(8, 24, 128, 128, 4)
    assert shard_mixer(full, 7, 8) == FullAttentionSpec(3, 1, 256, 64, 1e7)
    # more shards than heads, and channels on request
    assert shard_mixer(linear, 5, 96) == LinearAttentionSpec(1, 1, 128, 64, 4)
    by_channels = LinearAttentionSpec(16, 48, 128, 128, 4, split="head_v_dim")
    assert shard_mixer(by_channels, 1, 2) == LinearAttentionSpec(16, 48, 128, 64, 4, split="head_v_dim")
    # three does not divide the channels, so it divides the heads, whose groups then do not align
    assert shard_mixer(by_channels, 1, 6) == LinearAttentionSpec(16, 16, 128, 64, 4, split="head_v_dim")


@pytest.mark.parametrize("size", [1, 2])
def test_projections_of_what_ranks_sum_read_ahead(demo_path, size) -> None:
    config = load_model_config(demo_path)
    model = build_model(config, shard_of(0, size), torch.float32, CPU)
    found = [module for module in model.modules() if isinstance(module, FusedColumnLinear)]
    # each layer's first, and that of its MLP
    assert len(found) == 2 * config.num_layers
    assert all(module.after_sum == (size > 1) for module in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 8, "linear_num_key_heads": 8}, "num_attention_heads 4; .* is 4"),
        (
            {"num_attention_heads": 8, "linear_value_head_dim": 9},
            r"linear_num_value_heads \* linear_value_head_dim 36; .* is 4",
        ),
        (
            {"num_attention_heads": 8, "linear_num_value_heads": 8, "intermediate_size": 44},
            "intermediate_size 44; .* is 4",
        ),
        (
            {"linear_value_head_dim": 7, "intermediate_size": 68},
            r"linear_num_value_heads \* linear_value_head_dim 28 and num_attention_heads 4 and "
            "intermediate_size 68; .* is 4",
        ),
    ],
)
def test_a_size_that_does_not_divide(demo_path, tmp_path, changes, message) -> None:
    values = json.loads((demo_path / "config.json").read_text())
    values.update(num_attention_heads=4, linear_num_value_heads=4, linear_num_key_heads=4)
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ValueError, match=f"tp_size 8 does not divide {message}"):
        build_model(load_model_config(tmp_path), shard_of(0, 8), torch.float32, CPU)


def test_a_gpu_needs_some_channels_of_each_head() -> None:
    """The check comes before anything is put there."""
    spec = LinearAttentionSpec(1, 2, 64, 64, 4)
    with pytest.raises(ValueError, match="tp_size 16 leaves 8 of linear_value_head_dim 64 on a shard"):
        GatedDeltaNet(spec, 32, 1e-6, shard_of(0, 16), dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "splits"),
    [
        ("qwen3_5", ("heads", "intermediate")),
        ("qwen3_5", ("head_v_dim", "intermediate")),
        ("qwen3_5_moe", ("heads", "intermediate")),
        ("qwen3_5_moe", ("heads", "experts")),
        ("qwen3_next", ("head_v_dim", "experts")),
    ],
)
def test_a_shard_reads_its_own_slices_alone(kit, tmp_path, monkeypatch, kind, splits) -> None:
    """As many bytes of the files as its parameters have, which are those that the footprint counts."""
    kit.save_random_model(tmp_path, "lf", kind=kind)
    config = with_splits(load_model_config(tmp_path), *splits)
    num_read = 0
    unwrapped = staging._read

    def counted(fd: int, memory: memoryview, offset: int) -> None:
        nonlocal num_read
        num_read += len(memory)
        unwrapped(fd, memory, offset)

    monkeypatch.setattr(staging, "_read", counted)
    # one thread, for the count
    monkeypatch.setattr("hybridserve.parallel.weights.loader.READ_THREADS", 1)
    size_of_all = sum(file.stat().st_size for file in Path(tmp_path).glob("*.safetensors"))
    for rank in range(4):
        num_read = 0
        model = load_model(tmp_path, config, shard_of(rank, 4), torch.float32, CPU)
        # the vocabulary of 97 does not come out even
        vocabulary = [model.model.embed_tokens.weight, model.lm_head.weight]
        own = sum(p.numel() for p in model.parameters())
        assert num_read == 4 * own < 0.4 * size_of_all
        rows = measure_footprint(config, "float32", tp_size=4)
        counted_rows = rows.embedding_parameters + rows.head_parameters
        assert own - sum(w.numel() for w in vocabulary) == rows.parameters - counted_rows
