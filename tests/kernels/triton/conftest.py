"""Shared by the tests of Triton kernels: the device, and how many variants a kernel has compiled."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU, where Triton interprets its kernels and tests use small shapes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Tests of several processes share the GPU, and some take a tenth of its memory."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture
def count_variants() -> Callable[..., int]:
    """How many variants of these `triton.jit` functions are compiled; on a GPU only."""
    return lambda *kernels: sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())


@pytest.fixture
def device_rows(device: torch.device, poisoned_rows: Callable) -> Callable:
    """`poisoned_rows` on the device under test."""

    def make(row_shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> object:
        rows = poisoned_rows(row_shape, count, dtype)
        buffer = rows.buffer.to(device)
        view = buffer.view(dtype).as_strided(rows.view.shape, rows.view.stride())
        return type(rows)(buffer, view, rows.indices.to(device))

    return make
