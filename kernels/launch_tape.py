"""What one layer launches, launched again for the others of its kind.

A launch of a Triton kernel costs the host 20 to 100 µs with the function around it, most of it for checking
arguments, making views and finding the compiled kernel anew. Layers of a kind differ in nothing but where
their weights and caches are: so the first one's launches are noted while they are done, and the others' are
the same with these addresses exchanged, for some 10 µs each. Knows nothing of layers.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class _Launch:
    kernel: CompiledKernel
    grid: tuple[int, int, int]
    args: list[Any]
    """Addresses in the tensors' place."""
    own: tuple[tuple[int, int], ...]
    """(place among `args`, number of the layer's own tensor)."""


class LaunchTape:
    """The launches of one function, of one layer.

    Good as long as nothing but the layer changes: the same inputs, the same step. What the launches work on
    is kept in memory. The function must launch Triton kernels alone, since nothing else is noted, and read
    nothing of the layer but numbers that are alike in all layers, and tensors at `addresses`.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        """addresses: of the layer's own tensors; several may begin at one, if they do in each layer."""
        self._numbers = {address: number for number, address in enumerate(addresses)}
        self._launches: list[_Launch] = []
        self._kept: list[object] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, this thread's Triton launches are done and noted. One thread at a time."""
        thread = threading.get_ident()

        def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            compiled = original(kernel, *args, grid=grid, warmup=warmup, **options)
            if threading.get_ident() == thread:
                self._note(kernel, compiled, args, grid, options)
            return compiled

        with _recording:
            original = JITFunction.run
            JITFunction.run = run  # type: ignore[method-assign]
            try:
                yield
            finally:
                JITFunction.run = original  # type: ignore[method-assign]

    def play(self, addresses: Sequence[int]) -> None:
        """The same launches, on the current stream, for a layer whose own tensors are at these addresses."""
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        for launch in self._launches:
            args, kernel = launch.args, launch.kernel
            for place, number in launch.own:
                args[place] = addresses[number]
            # no metadata and no hooks: these are for profilers
            kernel.run(*launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)

    def _note(
        self,
        kernel: JITFunction,
        compiled: CompiledKernel,
        args: tuple[Any, ...],
        grid: Sequence[int],
        options: dict[str, Any],
    ) -> None:
        values = [
            args[place] if place < len(args) else options.get(param.name, param.default)
            for place, param in enumerate(kernel.params)
        ]
        own = []
        for place, value in enumerate(values):
            if isinstance(value, TensorDescriptor):
                assert value.base.data_ptr() not in self._numbers, "a layer's own tensor has a descriptor"
            if isinstance(value, torch.Tensor):
                address = values[place] = value.data_ptr()
                if address in self._numbers:
                    own.append((place, self._numbers[address]))
        self._kept.append(args)
        self._kept.append(options)
        x, y, z = (*grid, 1, 1)[:3]
        self._launches.append(_Launch(compiled, (x, y, z), values, tuple(own)))


_recording = threading.Lock()
