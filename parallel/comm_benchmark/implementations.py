"""The implementations of collectives that the benchmark compares, and those it would compare if they existed.

A registry: a new implementation registers itself here and is checked, timed and printed like the others. Owns
no kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.parallel.comm_benchmark.settings import BACKENDS
from hybridserve.parallel.group import TensorParallelGroup

Run = Callable[[], torch.Tensor]
"""Does the collective once, on the same memory every time, and returns its result on this rank."""


@dataclass(frozen=True)
class Implementation:
    """One way to do one collective."""

    name: str
    collective: str
    prepare: Callable[[TensorParallelGroup, torch.Tensor], Run]
    """(group, this rank's input, flat) -> what does it. The input is the message of an all-reduce or a
    reduce-scatter and this rank's part of an all-gather; an all-reduce may write its result into it."""
    unavailable: Callable[[TensorParallelGroup, str, int], str | None]
    """(group, backend, bytes of the message) -> why not there, or None."""
    capturable: bool = True
    """Whether a CUDA graph can hold it."""


_REGISTRY: dict[tuple[str, str], Implementation] = {}

PLANNED = {
    (
        "all_reduce",
        "one_shot",
    ): "one-shot: its kernel (kernels/all_reduce) is not wired to memory shared between processes yet",
    (
        "all_reduce",
        "two_shot",
    ): "two-shot: its kernel (kernels/all_reduce) is not wired to memory shared between processes yet",
    (
        "all_reduce",
        "one_shot_rms_norm",
    ): "one-shot with residual and RMSNorm: not wired to memory shared between processes yet",
}
"""What belongs in the comparison and is not there, with what to tell the reader."""


def register(implementation: Implementation) -> None:
    """Add an implementation; one of the same collective and name must not be there yet."""
    key = (implementation.collective, implementation.name)
    if key in _REGISTRY:
        raise ValueError(f"{key[0]} has an implementation named {key[1]!r} already")
    _REGISTRY[key] = implementation


def implementations(collective: str) -> tuple[Implementation, ...]:
    """Those of `collective`, in the order of their registration."""
    return tuple(i for (kind, _), i in _REGISTRY.items() if kind == collective)


def missing() -> dict[str, str]:
    """`collective/name` of what is planned and not registered -> why it is not measured."""
    return {f"{kind}/{name}": why for (kind, name), why in PLANNED.items() if (kind, name) not in _REGISTRY}


def _all_reduce(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    return lambda: group.all_reduce(x)


def _all_gather(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    out = x.new_empty(x.numel() * group.size)

    def run() -> torch.Tensor:
        group.backend._allgather_base(out, x).wait()
        return out

    return run


def _reduce_scatter(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    out = x.new_empty(x.numel() // group.size)

    def run() -> torch.Tensor:
        group.backend._reduce_scatter_base(out, x).wait()
        return out

    return run


def _only(name: str) -> Callable[[TensorParallelGroup, str, int], str | None]:
    def unavailable(group: TensorParallelGroup, backend: str, num_bytes: int) -> str | None:
        return None if backend == name else f"the backend is {backend}"

    return unavailable


for _backend in BACKENDS:
    for _collective, _prepare in (
        ("all_reduce", _all_reduce),
        ("all_gather", _all_gather),
        ("reduce_scatter", _reduce_scatter),
    ):
        register(Implementation(_backend, _collective, _prepare, _only(_backend)))
