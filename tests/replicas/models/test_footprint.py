"""Counts against the tensors of real files and of transformers' own models."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hybridserve.replicas.models.config import load_model_config, parse_model_config
from hybridserve.replicas.models.footprint import measure_footprint


def elements_in_files(folder: Path) -> int:
    """Elements of all tensors in the folder's safetensors, from their headers."""
    total = 0
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            total += count
    return total


def test_demo_model_has_as_many_parameters_as_its_files(demo_model: Path) -> None:
    footprint = measure_footprint(load_model_config(demo_model), "bfloat16")
    assert footprint.parameters == 15_134_752 == elements_in_files(demo_model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_parameters_are_those_of_transformers(tied: bool, key_heads: int) -> None:
    config = Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=6,
        linear_key_head_dim=12,
        linear_value_head_dim=28,
        linear_conv_kernel_dim=3,
        tie_word_embeddings=tied,
    )
    model = Qwen3_5ForCausalLM(config)
    parsed = parse_model_config(config.to_dict(), "test")
    assert measure_footprint(parsed, "float32").parameters == model.num_parameters()


def test_bytes_of_the_demo_model(demo_model: Path) -> None:
    footprint = measure_footprint(load_model_config(demo_model), "bfloat16")
    # six layers of 8 heads of 64 x 64 in fp32, and 4 columns of 1,024 channels in bf16
    assert footprint.state_bytes == 6 * (8 * 64 * 64 * 4 + 4 * 1024 * 2)
    # two layers, K and V, 2 heads of 64 in bf16
    assert footprint.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert [layer.state_bytes > 0 for layer in footprint.layers] == [True, True, True, False] * 2
    assert footprint.weight_bytes == 2 * footprint.parameters
    assert measure_footprint(load_model_config(demo_model), "float32").kv_bytes_per_token == 2048


def test_two_shards_halve_what_is_cut(demo_model: Path) -> None:
    config = load_model_config(demo_model)
    whole, half = (measure_footprint(config, "bfloat16", tp_size=size) for size in (1, 2))
    assert half.state_bytes == whole.state_bytes // 2
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    assert whole.parameters // 2 < half.parameters < whole.parameters // 2 + 10_000
    # four shards of two KV heads: each head is held twice
    assert measure_footprint(config, "bfloat16", tp_size=4).kv_bytes_per_token == half.kv_bytes_per_token


def test_a_shard_count_that_does_not_divide_is_named(demo_model: Path) -> None:
    config = replace(load_model_config(demo_model), intermediate_size=960)
    with pytest.raises(ValueError, match="tp_size 3 does not divide"):
        measure_footprint(config, "bfloat16", tp_size=3)
