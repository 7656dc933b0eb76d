"""Token embedding and output head, the vocabulary cut over the ranks of a group."""

import torch
import torch.nn.functional as F

from hybridserve.kernels.linear import linear
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter


def vocabulary_cut(vocab_size: int, group: TensorParallelGroup) -> Cut:
    """The rank's part: see `VocabularyShard`."""
    shard = VocabularyShard(vocab_size, group)
    return Cut(vocab_size, ((shard.start, shard.end),))


class VocabParallelEmbedding(Layer):
    """Rows of the embedding matrix for token ids."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        cut = vocabulary_cut(vocab_size, group)
        self.first_row, self.end_row = cut.ranges[0]
        weight = torch.empty(cut.count, hidden_size, dtype=dtype, device=device)
        self.weight = ShardedParameter(weight, {"": cut}, init="embedding")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T], all in [0, vocab_size). Returns [T, hidden_size] on every rank."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        # no index of the rows that are held: a CUDA graph cannot ask how many there are
        others = (token_ids < self.first_row) | (token_ids >= self.end_row)
        local = (token_ids - self.first_row).masked_fill_(others, 0)
        rows = F.embedding(local, self.weight).masked_fill_(others.unsqueeze(1), 0.0)
        return self.group.all_reduce(rows)


class ParallelLMHead(Layer):
    """Logits of the rank's part of the vocabulary; `tied` shares an embedding's weight, else it has its own.

    They are not gathered: `vocabulary` says which part they are, and draws from the ranks' parts.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        tied: VocabParallelEmbedding | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.vocabulary = VocabularyShard(vocab_size, group)
        if tied is not None:
            self.weight = tied.weight
            return
        cut = vocabulary_cut(vocab_size, group)
        weight = torch.empty(cut.count, hidden_size, dtype=dtype, device=device)
        self.weight = ShardedParameter(weight, {"": cut})

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden_size]. Returns fp32 [R, ids of this rank], in `out` if that is given."""
        return linear(hidden, self.weight, out=out, out_dtype=torch.float32, dependent=True)
