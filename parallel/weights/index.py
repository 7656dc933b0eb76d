"""Which file of a checkpoint folder holds which tensor, and where in it. Torch-free: it reads no values."""

import json
import struct
from pathlib import Path
from typing import Any

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
        return dict.fromkeys(read_header(single)[0], SINGLE_FILE)
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


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What the header of a safetensors file says, and the byte behind it, from which its offsets count.

    The first is, by tensor name, an object with "dtype", "shape" and "data_offsets". The file begins with 8
    bytes of little-endian length and then that much JSON.

    Raises:
        ValueError: it does not.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{path} is not a safetensors file: it has {len(prefix)} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header claims {length} bytes")
        header = file.read(length)
    try:
        entries = json.loads(header)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is no JSON object")
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, 8 + length
