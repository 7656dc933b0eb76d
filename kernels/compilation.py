"""Compiling Triton kernels before anybody waits for them: all at once, in threads, and counted.

`recorded_launches` runs ordinary code and notes which kernels it would launch, with which arguments; from
these, `compile_launches` compiles. So a model's kernels need no list: its own forward pass is the list.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction, KernelParam
from triton.tools.tensor_descriptor import TensorDescriptor


class Pointer:
    """In place of a tensor that a kernel is compiled for: keeps no memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments it was given."""

    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]
    """Keyword arguments: further arguments, constants, and options such as num_warps."""

    def compile(self) -> None:
        """Compile what these arguments need, unless it is there, and make it ready to be launched."""
        compiled = self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options)
        # Triton loads a kernel, and has a C compiler make its launcher, when it is first asked for it
        _ = compiled.run

    @property
    def variant(self) -> tuple[object, ...]:
        """Equal for launches that take the same compiled kernel; a few that do may differ."""
        params = {p.name: p for p in self.kernel.params}
        given = {**dict(zip(params, self.args, strict=False)), **self.options}
        return (id(self.kernel), *((name, _kind(value, params.get(name))) for name, value in given.items()))


def _kind(value: object, param: KernelParam | None) -> object:
    """What of an argument a compiled kernel may depend on; param: None for an option such as num_warps."""
    if isinstance(value, Pointer):
        aligned = value.data_ptr() % 16 == 0
        return value.dtype, aligned or (param is not None and param.do_not_specialize_on_alignment)
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    if param is None or param.is_constexpr:
        return value
    if isinstance(value, int):
        special = None if param.do_not_specialize else (value == 1, value % 16 == 0)
        return type(value), special, value.bit_length() > 31
    return type(value) if isinstance(value, float) else value


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside, this process' Triton launches are noted in the list that this gives, and not done.

    Of launches that take the same compiled kernel the first is noted. What a kernel would have written is
    then whatever was in memory: nothing may be read from it, and no PyTorch operation may take an index from
    it. One thread at a time.
    """
    launches: list[Launch] = []
    seen: set[tuple[object, ...]] = set()
    original = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        named = {name: _without_memory(value) for name, value in options.items()}
        launch = Launch(kernel, tuple(_without_memory(value) for value in args), named)
        if launch.variant not in seen:
            seen.add(launch.variant)
            launches.append(launch)

    with _recording:
        JITFunction.run = note  # type: ignore[method-assign]
        try:
            yield launches
        finally:
            JITFunction.run = original  # type: ignore[method-assign]


def _without_memory(value: object) -> object:
    return Pointer(value) if isinstance(value, torch.Tensor) else value


_recording = threading.Lock()


def is_recording() -> bool:
    """Whether launches are noted instead of done, so that libraries' kernels had better not run either."""
    return _recording.locked()


class Compilation:
    """Kernels being compiled in threads."""

    def __init__(self, launches: Sequence[Launch], threads: int) -> None:
        """threads: ptxas and LLVM leave Python's lock, so one a core."""
        self.num_kernels = len(launches)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
        # a thread's device is the first until it says otherwise, and what is compiled is kept by device
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._running = [self._pool.submit(_on_device, device, launch.compile) for launch in launches]

    def wait(self) -> None:
        """Until all are compiled; raises the first error."""
        try:
            for future in self._running:
                future.result()
        finally:
            self._pool.shutdown(cancel_futures=True)


def _on_device(device: int | None, compile_it: Callable[[], None]) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    compile_it()


@contextmanager
def counted_compilations() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many kernels were compiled, or loaded from disk, since the start."""
    count = 0
    knobs = triton.knobs.runtime
    before = knobs.jit_post_compile_hook

    def seen(*args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if before is not None:
            before(*args, **options)

    knobs.jit_post_compile_hook = seen
    try:
        yield lambda: count
    finally:
        knobs.jit_post_compile_hook = before
