"""Token embedding and output head, the vocabulary cut over the ranks of a group."""

import torch
import torch.nn.functional as F

from hybridserve.kernels.linear import linear
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter


def vocabulary_cut(vocab_size: int, group: TensorParallelGroup) -> Cut:
    """Equal parts, the last ones shorter (possibly empty) where the size does not divide the vocabulary."""
    part = rows_per_rank(vocab_size, group)
    start = min(group.rank * part, vocab_size)
    return Cut(vocab_size, ((start, min(start + part, vocab_size)),))


def rows_per_rank(vocab_size: int, group: TensorParallelGroup) -> int:
    return -(-vocab_size // group.size)


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
        held = (token_ids >= self.first_row) & (token_ids < self.end_row)
        rows = self.weight.new_zeros(token_ids.shape[0], self.weight.shape[1])
        rows[held] = self.weight[token_ids[held] - self.first_row]
        return self.group.all_reduce(rows)


class ParallelLMHead(Layer):
    """Logits over the whole vocabulary; `tied` shares an embedding's weight instead of holding its own."""

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
        self.group = group
        self.vocab_size = vocab_size
        if tied is not None:
            self.weight = tied.weight
            return
        cut = vocabulary_cut(vocab_size, group)
        weight = torch.empty(cut.count, hidden_size, dtype=dtype, device=device)
        self.weight = ShardedParameter(weight, {"": cut})

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden_size]. Returns fp32 [R, vocab_size] on every rank, `out` where that is given."""
        if self.group.size == 1:
            return linear(hidden, self.weight, out=out, out_dtype=torch.float32, dependent=True)
        logits = self._gathered(hidden)
        return logits if out is None else out.copy_(logits)

    def _gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self.weight, out_dtype=torch.float32, dependent=True)
        # ranks gather equal widths; the padding lies past the vocabulary's end and is cut off
        padding = rows_per_rank(self.vocab_size, self.group) - logits.shape[1]
        return self.group.all_gather(F.pad(logits, (0, padding)), dim=1)[:, : self.vocab_size]
