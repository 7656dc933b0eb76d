"""The implementations of collectives that the benchmark compares.

A registry: a new implementation registers itself here and is checked, timed and printed like the others. Owns
no kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridserve.kernels.all_reduce import WORD_BYTES, PeerMemory
from hybridserve.kernels.rms_norm import rms_norm_residual
from hybridserve.parallel.comm_benchmark.settings import BACKENDS
from hybridserve.parallel.group import TensorParallelGroup

_WIDEST_ROW = 8192
_EPS = 1e-6

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
    lacks: Callable[[TensorParallelGroup, int], str | None]
    """(group, bytes of the message) -> why it cannot run, or None."""
    backend: str | None = None
    """The only backend it is for; None: any."""
    capturable: bool = True
    """Whether a CUDA graph can hold it."""

    def unavailable(self, group: TensorParallelGroup, backend: str, num_bytes: int) -> str | None:
        """Why it cannot run, or None."""
        if self.backend not in (None, backend):
            return f"the backend is {backend}"
        return self.lacks(group, num_bytes)


_REGISTRY: dict[tuple[str, str], Implementation] = {}


def register(implementation: Implementation) -> None:
    """Add an implementation; one of the same collective and name must not be there yet."""
    key = (implementation.collective, implementation.name)
    if key in _REGISTRY:
        raise ValueError(f"{key[0]} has an implementation named {key[1]!r} already")
    _REGISTRY[key] = implementation


def implementations(collective: str) -> tuple[Implementation, ...]:
    """Those of `collective`, in the order of their registration."""
    return tuple(i for (kind, _), i in _REGISTRY.items() if kind == collective)


def not_measured(group: TensorParallelGroup, backend: str) -> dict[str, str]:
    """`collective/name` of the backend's that cannot run here, however short the message -> why."""
    reasons = {
        f"{kind}/{name}": one.lacks(group, 0)
        for (kind, name), one in _REGISTRY.items()
        if one.backend in (None, backend)
    }
    return {what: why for what, why in reasons.items() if why is not None}


def _all_reduce(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    by_backend = replace(group, peers=None)
    return lambda: by_backend.all_reduce(x)


def _all_reduce_and_norm(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    """As two launches, what `one_shot_rms_norm` does in one."""
    by_backend, rows = replace(group, peers=None), _as_rows(x)
    residual, weight = _zeros_and_ones(rows)

    def run() -> torch.Tensor:
        _, total = rms_norm_residual(by_backend.all_reduce(rows), residual, weight, _EPS, zero_centered=False)
        return total.view(-1)

    return run


def _one_shot(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce

    return _in_one_step(one_shot_all_reduce, group, x)


def _one_shot_and_norm(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    from hybridserve.kernels.all_reduce.triton_peers import one_shot_all_reduce

    return _in_one_step(one_shot_all_reduce, group, x, norms=True)


def _low_latency(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    from hybridserve.kernels.all_reduce.triton_low_latency import low_latency_all_reduce

    return _in_one_step(low_latency_all_reduce, group, x)


def _low_latency_and_norm(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    from hybridserve.kernels.all_reduce.triton_low_latency import low_latency_all_reduce

    return _in_one_step(low_latency_all_reduce, group, x, norms=True)


def _in_one_step(
    sum_up: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    group: TensorParallelGroup,
    x: torch.Tensor,
    *,
    norms: bool = False,
) -> Run:
    peers, rows = group.peers, _as_rows(x)
    how: dict[str, Any] = {"dependent": peers.dependent}
    if norms:
        residual, weight = _zeros_and_ones(rows)
        how |= {"residual": residual, "weight": weight, "eps": _EPS}
    return lambda: sum_up(peers.memory, rows, **how)[0].view(-1)


def _two_shot(group: TensorParallelGroup, x: torch.Tensor) -> Run:
    from hybridserve.kernels.all_reduce.triton_peers import two_shot_all_reduce

    peers, rows = group.peers, _as_rows(x)
    return lambda: two_shot_all_reduce(peers.memory, rows, dependent=peers.dependent).view(-1)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """The flat message as the rows of a hidden state of a usual width."""
    return x.view(-1, math.gcd(x.numel(), _WIDEST_ROW))


def _zeros_and_ones(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual that changes no sum, and a norm's weight."""
    return torch.zeros_like(rows), torch.ones(rows.shape[1], dtype=torch.float32, device=rows.device)


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


def _by_peers(group: TensorParallelGroup, num_bytes: int) -> str | None:
    return _up_to(group, num_bytes, lambda memory: memory.half_bytes)


def _by_slots(group: TensorParallelGroup, num_bytes: int) -> str | None:
    return _up_to(group, num_bytes, lambda memory: memory.slots.max_words * WORD_BYTES)


def _up_to(group: TensorParallelGroup, num_bytes: int, most: Callable[[PeerMemory], int]) -> str | None:
    if group.peers is None:
        return group.why_no_peers
    limit = most(group.peers.memory)
    return None if num_bytes <= limit else f"of messages of at most {limit} bytes"


for _backend in BACKENDS:
    for _collective, _name, _prepare in (
        ("all_reduce", _backend, _all_reduce),
        ("all_reduce", f"{_backend}_rms_norm", _all_reduce_and_norm),
        ("all_gather", _backend, _all_gather),
        ("reduce_scatter", _backend, _reduce_scatter),
    ):
        register(Implementation(_name, _collective, _prepare, lambda group, num_bytes: None, _backend))
for _name, _prepare in (
    ("one_shot", _one_shot),
    ("two_shot", _two_shot),
    ("one_shot_rms_norm", _one_shot_and_norm),
):
    register(Implementation(_name, "all_reduce", _prepare, _by_peers))
for _name, _prepare in (("low_latency", _low_latency), ("low_latency_rms_norm", _low_latency_and_norm)):
    register(Implementation(_name, "all_reduce", _prepare, _by_slots))
