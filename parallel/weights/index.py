"""Which file of a checkpoint folder holds which tensor. Torch-free: it reads names, never values."""

import json
import struct
from pathlib import Path

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000


def read_weight_map(folder: str | Path) -> dict[str, str]:
    """Tensor name -> file name. The index is the truth where there is one; stray files are ignored.

    Returns an empty dict for a folder without safetensors.

    Raises:
        ValueError: the index, or the header of the single file, cannot be read.
    """
    folder = Path(folder)
    index = folder / INDEX_FILE
    if index.is_file():
        return _read_index(index)
    single = folder / SINGLE_FILE
    if single.is_file():
        return dict.fromkeys(_read_header(single), SINGLE_FILE)
    return {}


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"weight_map in {path} must be an object with entries, got {weight_map!r}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"weight_map in {path} must name files of its folder, got {file!r} for {name}")
    return weight_map


def _read_header(path: Path) -> list[str]:
    """Names of the tensors in one safetensors file: 8 bytes of little-endian length, then that much JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path} is not a safetensors file: it has {len(prefix)} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header claims {length} bytes")
        header = file.read(length)
    try:
        names = json.loads(header)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return [name for name in names if name != "__metadata__"]
