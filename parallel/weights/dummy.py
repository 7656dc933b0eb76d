"""Random weights in place of a checkpoint: for benchmarks of shapes whose weights are not at hand.

A tensor's values depend on the seed and its name alone, so every shard of every tp_size sees the same model.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal with variance 1 / fan-in, which keeps activations at their input's scale."""
    fan_in = math.prod(shape[1:]) or 1
    return torch.randn(shape, generator=generator) / math.sqrt(fan_in)


def _stacked_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Matrices [..., rows, columns], each as `_weight` draws one."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])


def _embedding(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 0.02


def _small(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Biases, and norm weights that are centred on zero."""
    return torch.randn(shape, generator=generator) * 0.02


def _one(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norm weights that are centred on one."""
    return 1.0 + torch.randn(shape, generator=generator) * 0.02


def _a_log(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """log A for A uniform in [1, 16], the usual start of training."""
    return torch.log(1.0 + 15.0 * torch.rand(shape, generator=generator))


def _dt_bias(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The inverse softplus of a time step that is log-uniform in [0.001, 0.1]."""
    low, high = math.log(0.001), math.log(0.1)
    dt = torch.exp(low + (high - low) * torch.rand(shape, generator=generator))
    return dt + torch.log(-torch.expm1(-dt))


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "weight": _weight,
    "stacked_weight": _stacked_weight,
    "embedding": _embedding,
    "bias": _small,
    "norm_around_zero": _small,
    "norm_around_one": _one,
    "a_log": _a_log,
    "dt_bias": _dt_bias,
}


@dataclass(frozen=True)
class DummyTensor:
    """One tensor of a checkpoint that does not exist (a `TensorSource`)."""

    name: str
    shape: tuple[int, ...]
    init: str
    seed: int
    origin: str = "random weights"

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.shape)

    @cached_property
    def _values(self) -> torch.Tensor:
        generator = torch.Generator()
        # crc32, since Python's own hash of a string changes with every process
        generator.manual_seed(zlib.crc32(f"{self.seed}:{self.name}".encode()))
        return DISTRIBUTIONS[self.init](self.shape, generator)

    def read(self, dim: int, start: int, end: int) -> torch.Tensor:
        return self._values.narrow(dim, start, end - start)
