"""The shapes of `configs/models`: what they are, and how a file in the place of a folder is read."""

import json
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import SINGLE
from hybridserve.replicas.models.config import is_shape_file, load_model_config, read_mapping
from hybridserve.replicas.models.footprint import measure_footprint
from hybridserve.replicas.models.registry import load_model

DENSE = {
    # parameters in millions, state and KV bytes of one sequence and token in bf16
    "qwen3.5-0.8b": (752, 18, 12),
    "qwen3.5-4b": (4206, 48, 32),
    "qwen3.5-9b": (8954, 48, 32),
    "qwen3.5-27b": (26896, 144, 64),
}
MOE = {"qwen3.5-35b-a3b": (40, 256), "qwen3-next-80b-a3b": (48, 512)}


@pytest.fixture
def shapes(repo_root: Path) -> Path:
    return repo_root / "configs" / "models"


def test_every_shape_is_tested(shapes) -> None:
    assert {file.stem for file in shapes.iterdir()} == {*DENSE, *MOE}


@pytest.mark.parametrize("name", DENSE)
def test_dense_shapes(shapes, name) -> None:
    config = load_model_config(shapes / f"{name}.yaml")
    footprint = measure_footprint(config, config.dtype)
    millions, state_mib, kv_kib = DENSE[name]
    assert round(footprint.parameters / 1e6) == millions
    assert footprint.kv_bytes_per_token == kv_kib * 1024
    conv = sum(4 * 2 * (2 * m.total_key_dim + m.total_value_dim) for m in config.mixers[::4])
    assert footprint.state_bytes == state_mib * 2**20 + 3 * conv
    assert config.num_layers == 4 * len(config.full_layers) and config.full_layers[0] == 3
    assert config.max_position_embeddings == 262144 and config.dtype == "bfloat16"


@pytest.mark.parametrize("name", MOE)
def test_moe_shapes(shapes, name) -> None:
    values = read_mapping(shapes / f"{name}.yaml")
    layers, experts = MOE[name]
    assert (values["num_hidden_layers"], values["num_experts"]) == (layers, experts)
    config = load_model_config(shapes / f"{name}.yaml")
    assert config.num_layers == layers and len(config.full_layers) == layers // 4


def test_what_a_shape_file_is(tmp_path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert is_shape_file("a/b.yaml") and is_shape_file(tmp_path / "c.yml") and is_shape_file("d.json")
    assert not is_shape_file(tmp_path / "folder.json") and not is_shape_file("Qwen3.5-9B")


def test_a_shape_may_be_json_and_takes_overrides(shapes, tmp_path) -> None:
    values = read_mapping(shapes / "qwen3.5-0.8b.yaml")
    (tmp_path / "shape.json").write_text(json.dumps(values))
    config = load_model_config(tmp_path / "shape.json", {"num_hidden_layers": 4})
    assert config == load_model_config(shapes / "qwen3.5-0.8b.yaml", {"num_hidden_layers": 4})
    assert config.num_layers == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "model shape .*shape.yaml does not exist"),
        (b"a: [", "shape.yaml is not valid YAML"),
        (b"\xff", "shape.yaml is not valid YAML"),
        (b"- a", r"must hold the keys of a config.json, got \['a'\]"),
        (b"1: a", "must hold the keys of a config.json"),
        (b"", "must hold the keys of a config.json, got None"),
        (b"hidden_size: 3", "shape.yaml lacks the key model_type"),
    ],
)
def test_bad_shape_files(tmp_path, content, message) -> None:
    if content is not None:
        (tmp_path / "shape.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path / "shape.yaml")


def test_a_shape_has_no_weights(shapes) -> None:
    path = shapes / "qwen3.5-0.8b.yaml"
    with pytest.raises(ValueError, match="load_format is 'auto', but .* is a shape without weights: use 'd"):
        load_model(path, load_model_config(path), SINGLE, torch.float32, torch.device("cpu"))
