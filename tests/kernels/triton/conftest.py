"""Shared by the tests of Triton kernels: the device, and how many variants a kernel has compiled."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU, where Triton interprets its kernels and tests use small shapes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture
def count_variants() -> Callable[..., int]:
    """How many variants of these `triton.jit` functions are compiled; on a GPU only."""
    return lambda *kernels: sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())
