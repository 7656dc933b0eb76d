"""A parameter made of many checkpoint tensors, each with a place of its own in it: the experts of a layer.

Owns the names of the pieces. What a piece takes of its tensor is its view's own `ShardedParameter`; the views
exist only while they are asked for, as a layer of 512 experts has over 1,500 of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hybridserve.parallel.weights.parameter import ShardedParameter

Pieces = Callable[[torch.Tensor], Iterator[tuple[str, ShardedParameter]]]
"""The parameter's data -> (checkpoint name below the parameter's module, the view that it fills) pairs, which
together cover the data."""


class GroupedParameter(nn.Parameter):
    """Frozen weights of one shard, filled piece by piece."""

    pieces: Pieces

    def __new__(cls, data: torch.Tensor, pieces: Pieces) -> "GroupedParameter":
        self = super().__new__(cls, data, requires_grad=False)
        self.pieces = pieces
        return self

    def parts(self, name: str) -> Iterator[tuple[str, ShardedParameter, str]]:
        module = name.rpartition(".")[0]
        for piece, view in self.pieces(self.data):
            assert list(view.sections) == [""], piece
            yield f"{module}.{piece}", view, ""
