"""Shared by the tests of Triton kernels: the device, and how many variants a kernel has compiled."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _names_are_looked_up_once() -> Iterator[None]:
    """Before each call of a device function, Triton's interpreter looks through the language's names for
    built-in functions, which it then replaces: half of its time. Which names those are never changes."""
    # not before it is known whether kernels are interpreted
    from triton import language
    from triton.runtime import interpreter

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, one in inspect.getmembers(package) if language.core.is_builtin(one)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            # a call from within a call finds it replaced
            if language.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    # this is about time alone: another Triton may do it in another way
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_builtin", patch, raising=False)
        yield


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
