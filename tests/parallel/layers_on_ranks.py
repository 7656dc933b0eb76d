"""What every rank of a group computes for `test_layers.py`: sharded layers on fixed inputs."""

import torch
from torch import nn

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.heads import shard_heads
from hybridserve.parallel.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hybridserve.parallel.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from hybridserve.parallel.weights.loader import checkpoint_targets, load_dummy
from hybridserve.parallel.weights.parameter import Cut, even, head_ranges

WHERE = {"dtype": torch.float32, "device": torch.device("cpu")}
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 12, 20, 37, 4, 1, 6


def filled(module: nn.Module) -> nn.Module:
    """The same whole weights for every rank, each reading its own part."""
    load_dummy(checkpoint_targets(module, lambda name: name), seed=7)
    return module


class Pair(nn.Module):
    """Column- then row-parallel, with biases and a residual."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, INNER, group, bias=True, **WHERE)
        self.down = RowParallelLinear(even(INNER, group.rank, group.size), HIDDEN, group, bias=True, **WHERE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        summed, normed = self.down.forward_and_norm(y, x, torch.tanh)
        begun = self.down.begin(y, x).end(torch.tanh)
        return torch.stack([self.down(y), summed, normed, *begun])


class Merged(nn.Module):
    """Two fused column-parallel projections, multiplied, then row-parallel."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__()
        self.both = MergedColumnParallelLinear(HIDDEN, {"a": INNER, "b": INNER}, group, **WHERE)
        self.down = RowParallelLinear(even(INNER, group.rank, group.size), HIDDEN, group, **WHERE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.both(x).split(self.both.section_sizes, dim=-1)
        return self.down(a * b)


class Heads(nn.Module):
    """Gated query heads that read a KV head which both ranks hold, then row-parallel."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__()
        shard = shard_heads("heads", HEADS, KV_HEADS, group.rank, group.size)
        options = {"output_gate": True, "bias": True, **WHERE}
        self.qkv = QKVParallelLinear(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, shard, **options)
        columns = Cut(HEADS * HEAD_DIM, head_ranges(shard.heads, HEAD_DIM, HEAD_DIM))
        self.out = RowParallelLinear(columns, HIDDEN, group, **WHERE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, gate, k, v = (
            part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(x).split(self.qkv.split_sizes, dim=-1)
        )
        return self.out((q * k * gate.sigmoid() + v).flatten(1))


class Vocabulary(nn.Module):
    """Embedding and head, whose vocabulary two does not divide; the head tied or its own."""

    def __init__(self, group: TensorParallelGroup, tied: bool) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, group, **WHERE)
        self.head = ParallelLMHead(VOCAB, HIDDEN, group, tied=self.embed if tied else None, **WHERE)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head.vocabulary.gather(self.head(self.embed(token_ids)))


def results(group: TensorParallelGroup) -> dict[str, torch.Tensor]:
    """Each layer's output on fixed inputs."""
    torch.set_num_threads(1)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    every_token = torch.arange(VOCAB)
    with torch.inference_mode():
        return {
            "pair": filled(Pair(group))(x),
            "merged": filled(Merged(group))(x),
            "heads": filled(Heads(group))(x),
            "tied": filled(Vocabulary(group, tied=True))(every_token),
            "untied": filled(Vocabulary(group, tied=False))(every_token),
        }
