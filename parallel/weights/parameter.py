"""A shard's parameter, and which parts of which checkpoint tensors fill it.

Owns cutting: a layer says how its parameter is made up, the parameter then loads itself. Knows nothing of
files (it reads through `TensorSource`) and nothing of models.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


class TensorSource(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy_to(self, target: torch.Tensor, dim: int, start: int, end: int) -> None:
        """Fill `target` with indices [start, end) of dimension `dim`, everything of the others.

        `target` is on any device and has the shape of that. The work may be queued on the device's current
        stream. Several threads may call it at once.
        """
        ...


@dataclass(frozen=True)
class Cut:
    """The parts of one dimension of a checkpoint tensor that a shard holds, in the order it holds them."""

    total: int
    ranges: tuple[tuple[int, int], ...]
    """[start, end) pairs."""

    @property
    def count(self) -> int:
        return sum(end - start for start, end in self.ranges)


def whole(total: int) -> Cut:
    return Cut(total, ((0, total),))


def even(total: int, rank: int, size: int) -> Cut:
    """Part `rank` of `size` equal parts; the caller has checked that `size` divides `total`."""
    assert total % size == 0, (total, size)
    part = total // size
    return Cut(total, ((rank * part, (rank + 1) * part),))


def joined_ranges(starts: Iterable[int], width: int) -> tuple[tuple[int, int], ...]:
    """Ranges of `width` rows at `starts`, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for start in starts:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], start + width)
        else:
            ranges.append((start, start + width))
    return tuple(ranges)


def head_ranges(heads: Iterable[int], stride: int, width: int, base: int = 0) -> tuple[tuple[int, int], ...]:
    """Ranges of `width` rows at `base + head * stride`, neighbours joined."""
    return joined_ranges((base + head * stride for head in heads), width)


@runtime_checkable
class LoadedParameter(Protocol):
    """A parameter that knows which checkpoint tensors fill it."""

    def parts(self, name: str) -> Iterator[tuple[str, "ShardedParameter", str]]:
        """(tensor's name, what it fills, which section of that), where `name` is the parameter's own.

        Names are the model's; the loader renames them to the checkpoint's.
        """
        ...


class ShardedParameter(nn.Parameter):
    """Frozen weights of one shard, made of the cuts of one or more checkpoint tensors along one dimension.

    `sections` maps the name of a checkpoint module (its last part: "q_proj") to its cut, in the parameter's
    order; the key "" stands for the parameter's own module. `squeeze` lists dimensions of size 1 that the
    checkpoint has and the parameter lacks. `shift` is added on loading (1 for zero-centred norm weights).
    `init` names the distribution of dummy weights, one of `dummy.DISTRIBUTIONS`.
    """

    sections: Mapping[str, Cut]
    dim: int
    squeeze: tuple[int, ...]
    shift: float
    init: str

    def __new__(
        cls,
        data: torch.Tensor,
        sections: Mapping[str, Cut],
        *,
        dim: int = 0,
        squeeze: tuple[int, ...] = (),
        shift: float = 0.0,
        init: str = "weight",
    ) -> "ShardedParameter":
        assert sum(cut.count for cut in sections.values()) == data.shape[dim], (sections, data.shape)
        self = super().__new__(cls, data, requires_grad=False)
        self.sections = dict(sections)
        self.dim, self.squeeze, self.shift, self.init = dim, squeeze, shift, init
        return self

    def parts(self, name: str) -> Iterator[tuple[str, "ShardedParameter", str]]:
        """A parameter `a.b.qkv_proj.weight` with sections q_proj, k_proj, v_proj is filled from
        `a.b.q_proj.weight` and so on; one with the section "" from its own name."""
        path = name.split(".")
        for section in self.sections:
            yield ".".join([*path[:-2], section, path[-1]]) if section else name, self, section

    def checkpoint_shape(self, section: str) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = list(self.shape)
        shape[self.dim] = self.sections[section].total
        for dim in self.squeeze:
            shape.insert(dim, 1)
        return tuple(shape)

    def check_shape(self, source: TensorSource, section: str) -> None:
        """Raise ValueError if the tensor is misshapen; names the tensor, its file and both shapes."""
        expected = self.checkpoint_shape(section)
        if source.shape != expected:
            raise ValueError(
                f"tensor {source.name} in {source.origin} has shape {list(source.shape)}, "
                f"the model's config asks for {list(expected)}"
            )

    def weight_loader(self, source: TensorSource, section: str) -> None:
        """Read this shard's part of `source` into its place, in the parameter's dtype.

        Raises:
            ValueError: see `check_shape`.
        """
        self.check_shape(source, section)
        assert not self.squeeze or self.dim < min(self.squeeze), "the cut dimension keeps its number"
        offset = self._offset(section)
        for start, end in self.sections[section].ranges:
            target = self.data.narrow(self.dim, offset, end - start)
            for dim in self.squeeze:
                target = target.unsqueeze(dim)
            source.copy_to(target, self.dim, start, end)
            if self.shift:
                target.add_(self.shift)
            offset += end - start

    def _offset(self, section: str) -> int:
        offset = 0
        for name, cut in self.sections.items():
            if name == section:
                return offset
            offset += cut.count
        raise KeyError(section)
