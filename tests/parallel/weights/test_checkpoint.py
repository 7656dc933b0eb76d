"""`read_weight_map` and `Checkpoint`: which tensors are where, and what is said when they are not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hybridserve.parallel.weights.checkpoint import Checkpoint
from hybridserve.parallel.weights.index import read_weight_map


def write_index(folder, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_single_file(tmp_path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_weight_map(tmp_path) == {"a": "model.safetensors"}
    with Checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("a")
        assert tensor.shape == (2, 3) and tensor.num_bytes == 24 and tensor.origin == "model.safetensors"
        row, columns = torch.empty(1, 3), torch.empty(2, 2)
        tensor.copy_to(row, 0, 1, 2)
        tensor.copy_to(columns, 1, 0, 2)
        assert row.tolist() == [[3.0, 4.0, 5.0]] and columns.tolist() == [[0.0, 1.0], [3.0, 4.0]]


def test_the_index_is_the_truth(tmp_path) -> None:
    save_file({"stray": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(1), "unlisted": torch.zeros(1)}, tmp_path / "part.safetensors")
    write_index(tmp_path, {"a": "part.safetensors"})
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == ("a",)


def test_no_safetensors(tmp_path) -> None:
    assert read_weight_map(tmp_path) == {}
    with pytest.raises(ValueError, match="no model.safetensors.index.json and no model.safetensors in"):
        Checkpoint(tmp_path)


def test_missing_file(tmp_path) -> None:
    write_index(tmp_path, {"a": "gone.safetensors", "b": "gone.safetensors"})
    with (
        pytest.raises(ValueError, match="missing file gone.safetensors in .* holds a and 1 more"),
        Checkpoint(tmp_path),
    ):
        pass


def test_tensor_missing_from_its_file(tmp_path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "part.safetensors")
    write_index(tmp_path, {"b": "part.safetensors"})
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match="tensor b is missing from part.safetensors"),
    ):
        checkpoint.tensor("b")


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0nope", b"\x09" + b"\0" * 7]
)
def test_damaged_single_file(tmp_path, content) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file"):
        read_weight_map(tmp_path)


def test_an_empty_file_is_called_that(tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="not a safetensors file: it has 0 bytes"):
        read_weight_map(tmp_path)


def test_damaged_part(tmp_path) -> None:
    (tmp_path / "part.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 garbage")
    write_index(tmp_path, {"a": "part.safetensors"})
    with (
        pytest.raises(ValueError, match="part.safetensors is not a readable safetensors file"),
        Checkpoint(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "must be an object with entries"),
        (["a"], "must be an object with entries"),
        ({"a": "../elsewhere.safetensors"}, "name files of its folder, got '../elsewhere.safetensors' for a"),
        ({"a": 3}, "name files of its folder, got 3 for a"),
    ],
)
def test_bad_weight_map(tmp_path, weight_map, message) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=message):
        read_weight_map(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "3"])
def test_index_that_is_none(tmp_path, text) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="not a safetensors index with a weight_map"):
        read_weight_map(tmp_path)
