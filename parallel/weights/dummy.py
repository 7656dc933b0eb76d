"""Random weights in place of a checkpoint: for benchmarks of shapes whose weights are not at hand.

A tensor is drawn in blocks of rows, on the device of the parameter it fills, in fp32, and each block from a
seed of its own: the hash of the seed, the tensor's name and the block's first row. A shard of any tp_size
therefore sees the same model (on one kind of device: a CPU and a GPU have different generators), whatever its
dtype and memory order, and no more than one block exists beside the parameter.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.parallel.weights.rows import copy_rows

BLOCK_ELEMENTS = 2**22
"""Of one block at most, unless a row has more: 16 MiB in fp32."""

Draw = Callable[[torch.Tensor, torch.Generator], None]
"""Fills an fp32 tensor [rows, ...] in place."""


def _weight(out: torch.Tensor, generator: torch.Generator) -> None:
    """Normal with variance 1 / fan-in, which keeps activations at their input's scale."""
    fan_in = math.prod(out.shape[1:]) or 1
    out.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)


def _stacked_weight(out: torch.Tensor, generator: torch.Generator) -> None:
    """Matrices [..., rows, columns], each as `_weight` draws one."""
    out.normal_(0.0, 1.0 / math.sqrt(out.shape[-1]), generator=generator)


def _small(out: torch.Tensor, generator: torch.Generator) -> None:
    """Embeddings, biases, and norm weights that are centred on zero."""
    out.normal_(0.0, 0.02, generator=generator)


def _one(out: torch.Tensor, generator: torch.Generator) -> None:
    """Norm weights that are centred on one."""
    out.normal_(1.0, 0.02, generator=generator)


def _a_log(out: torch.Tensor, generator: torch.Generator) -> None:
    """log A for A uniform in [1, 16], the usual start of training."""
    out.uniform_(1.0, 16.0, generator=generator).log_()


def _dt_bias(out: torch.Tensor, generator: torch.Generator) -> None:
    """The inverse softplus of a time step that is log-uniform in [0.001, 0.1]."""
    dt = out.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
    out += torch.log(-torch.expm1(-dt))


DISTRIBUTIONS: dict[str, Draw] = {
    "weight": _weight,
    "stacked_weight": _stacked_weight,
    "embedding": _small,
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

    def copy_to(self, target: torch.Tensor, dim: int, start: int, end: int) -> None:
        first, last = (start, end) if dim == 0 else (0, self.shape[0])
        rows = max(1, BLOCK_ELEMENTS // (math.prod(self.shape[1:]) or 1))
        generator = torch.Generator(target.device)
        for begin in range(first // rows * rows, last, rows):
            values = self._block(begin, min(begin + rows, self.shape[0]), generator)
            low, high = max(begin, first), min(begin + len(values), last)
            values = values[low - begin : high - begin]
            if dim:
                values = values.narrow(dim, start, end - start)
            copy_rows(target[low - first : high - first], values)
            # or it would live until the next one is drawn
            del values

    def _block(self, begin: int, stop: int, generator: torch.Generator) -> torch.Tensor:
        """fp32 rows [begin, stop), which must be a block's."""
        key = f"{self.seed}:{self.name}:{begin}".encode()
        # not Python's own hash of a string, which changes with every process
        digest = hashlib.blake2b(key, digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        values = torch.empty((stop - begin, *self.shape[1:]), dtype=torch.float32, device=generator.device)
        DISTRIBUTIONS[self.init](values, generator)
        return values
