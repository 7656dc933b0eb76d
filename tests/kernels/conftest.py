"""Shared by the kernel tests: one thread, poisoned arenas, and the derived tolerance."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

ROW_STEP = 256


@pytest.fixture(autouse=True)
def _one_seeded_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@dataclass
class PoisonedRows:
    """A buffer of 0xFF (NaN in every float), its view as rows at every 256 bytes, and disjoint rows."""

    buffer: torch.Tensor
    view: torch.Tensor
    indices: torch.Tensor

    def untouched(self, before: torch.Tensor, written: torch.Tensor) -> bool:
        """Whether all bytes outside the rows `written` equal `before`, a clone of the buffer."""
        row_bytes = math.prod(self.view.shape[1:]) * self.view.element_size()
        same = self.buffer == before
        for row in written.tolist():
            same[row * ROW_STEP : row * ROW_STEP + row_bytes] = True
        return bool(same.all())


@pytest.fixture
def poisoned_rows() -> Callable[..., PoisonedRows]:
    def make(row_shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> PoisonedRows:
        itemsize = torch.empty((), dtype=dtype).element_size()
        row_size = math.prod(row_shape)
        steps = -(-row_size * itemsize // ROW_STEP) + 1
        buffer = torch.full(((count + 1) * steps * ROW_STEP,), 0xFF, dtype=torch.uint8)
        inner = torch.empty(row_shape).stride()
        rows = (buffer.numel() - row_size * itemsize) // ROW_STEP + 1
        flat = buffer.view(dtype)
        view = flat.as_strided((rows, *row_shape), (ROW_STEP // itemsize, *inner))
        return PoisonedRows(buffer, view, torch.randperm(count) * steps)

    return make


@pytest.fixture
def assert_accurate() -> Callable[..., None]:
    """Error against fp64 at most twice plain PyTorch's in fp32, or a few roundings of the largest value."""

    def check(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, roundings: float = 8) -> None:
        assert actual.shape == exact.shape
        if not exact.numel():
            return
        error = (actual.double() - exact).abs().max().item()
        plain_error = (plain.double() - exact).abs().max().item()
        floor = roundings * torch.finfo(torch.float32).eps * exact.abs().max().item()
        assert error <= max(2 * plain_error, floor), f"error {error:.3g}, plain fp32 {plain_error:.3g}"

    return check
