"""A folder of safetensors: opens its files, hands out tensors unread, and names whatever is wrong with them.

Knows nothing of models: what should be in the folder is the loader's business.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridserve.parallel.weights.index import INDEX_FILE, SINGLE_FILE, read_weight_map

# anything else is a quantised tensor, whose bytes mean nothing without its scales
FLOAT_DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of an open file (a `TensorSource`)."""

    name: str
    origin: str
    shape: tuple[int, ...]
    dtype: str
    view: Any
    """safetensors' slice object, which has no public type."""

    @property
    def num_bytes(self) -> int:
        return FLOAT_DTYPES[self.dtype] * torch.Size(self.shape).numel()

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        return self.view[(slice(None),) * dim + (slice(start, end),)]


class Checkpoint:
    """Open safetensors of one folder; a context manager.

    Raises:
        ValueError: the folder has no safetensors, or a file that the index names is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.weight_map = read_weight_map(folder)
        if not self.weight_map:
            raise ValueError(f"no {INDEX_FILE} and no {SINGLE_FILE} in {folder}")
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._held: dict[str, frozenset[str]] = {}

    def __enter__(self) -> "Checkpoint":
        for file in sorted(set(self.weight_map.values())):
            try:
                self._open(file)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, file: str) -> None:
        path = self.folder / file
        names = [name for name, where in self.weight_map.items() if where == file]
        if not path.is_file():
            raise ValueError(
                f"missing file {file} in {self.folder}: it holds {names[0]} and {len(names) - 1} more"
            )
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        self._files[file] = handle
        self._held[file] = frozenset(handle.keys())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.weight_map)

    def tensor(self, name: str) -> CheckpointTensor:
        """The tensor `name`, which the weight map must list.

        Raises:
            ValueError: its file lacks it, or it is not of a floating-point dtype.
        """
        file = self.weight_map[name]
        if name not in self._held[file]:
            raise ValueError(
                f"tensor {name} is missing from {file}, where the index of {self.folder} puts it"
            )
        view = self._files[file].get_slice(name)
        dtype = str(view.get_dtype())
        if dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"tensor {name} in {file} is stored as {dtype}; quantised weights are not supported, "
                f"only {', '.join(FLOAT_DTYPES)}"
            )
        return CheckpointTensor(name, file, tuple(view.get_shape()), dtype, view)
