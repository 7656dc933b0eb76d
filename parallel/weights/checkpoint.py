"""A folder of safetensors: opens its files, hands out tensors unread, and names whatever is wrong with them.

Knows nothing of models: what should be in the folder is the loader's business.
"""

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridserve.parallel.weights.index import INDEX_FILE, SINGLE_FILE, read_header, read_weight_map
from hybridserve.parallel.weights.staging import Staging

# anything else is a quantised tensor, whose bytes mean nothing without its scales
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of an open file (a `TensorSource`)."""

    name: str
    origin: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: "_File"
    offset: int
    """Byte of the file at which it starts."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def copy_to(self, target: torch.Tensor, dim: int, start: int, end: int) -> None:
        staging = self.file.staging_for(target.device)
        try:
            staging.fill(target, self.file.fd, self.offset, self.shape, self.dtype, dim, start, end)
        except (OSError, EOFError) as error:
            raise ValueError(f"tensor {self.name} in {self.origin} cannot be read: {error}") from error


class _Buffers(threading.local):
    """Each thread's staging buffers, by device."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Staging] = {}


class _File:
    """One open safetensors file."""

    def __init__(self, path: Path, buffers: _Buffers) -> None:
        try:
            # the library's own check of the header against the file's length
            with safe_open(str(path), framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        self.entries, self.data_start = read_header(path)
        self._buffers = buffers
        self.fd = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)

    def staging_for(self, device: torch.device) -> Staging:
        stagings = self._buffers.by_device
        if device not in stagings:
            stagings[device] = Staging(device)
        return stagings[device]


class Checkpoint:
    """Open safetensors of one folder; a context manager. Its tensors may be read from several threads.

    Raises:
        ValueError: the folder has no safetensors, or a file that the index names is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weight_map = read_weight_map(folder)
        if not self.weight_map:
            raise ValueError(f"no {INDEX_FILE} and no {SINGLE_FILE} in {folder}")
        self._stack = ExitStack()
        self._files: dict[str, _File] = {}

    def __enter__(self) -> "Checkpoint":
        buffers = _Buffers()
        for name in sorted(set(self.weight_map.values())):
            try:
                self._open(name, buffers)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, file: str, buffers: _Buffers) -> None:
        path = self.folder / file
        if not path.is_file():
            names = [name for name, where in self.weight_map.items() if where == file]
            raise ValueError(
                f"missing file {file} in {self.folder}: it holds {names[0]} and {len(names) - 1} more"
            )
        self._files[file] = opened = _File(path, buffers)
        self._stack.callback(opened.close)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.weight_map)

    def tensor(self, name: str) -> CheckpointTensor:
        """The tensor `name`, which the weight map must list.

        Raises:
            ValueError: its file lacks it, or it is not of a floating-point dtype.
        """
        file = self.weight_map[name]
        opened = self._files[file]
        entry: dict[str, Any] | None = opened.entries.get(name)
        if entry is None:
            raise ValueError(
                f"tensor {name} is missing from {file}, where the index of {self.folder} puts it"
            )
        dtype = FLOAT_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"tensor {name} in {file} is stored as {entry['dtype']}; quantised weights are not "
                f"supported, only {', '.join(FLOAT_DTYPES)}"
            )
        offset = opened.data_start + entry["data_offsets"][0]
        return CheckpointTensor(name, file, tuple(entry["shape"]), dtype, opened, offset)
