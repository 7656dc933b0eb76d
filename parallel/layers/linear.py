"""Linear layers cut over the ranks of a group.

Owns which rows or columns of a weight a rank holds and when the ranks' results are summed. Knows nothing of
the mixers these projections belong to; a layer fuses projections that read the same input, because every
separate small matrix product costs a launch.
"""

from collections.abc import Mapping
from functools import partial

import torch

from hybridserve.kernels.linear import linear, linear_silu_and_mul
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.heads import HeadShard, divide
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.sums import BegunSum, begin_sum, sum_and_norm
from hybridserve.parallel.peer_sums import Norm
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter, even, head_ranges, whole


class FusedColumnLinear(Layer):
    """y = x W^T (+ b) for several checkpoint projections at once, each cut by rows in its own way."""

    def __init__(
        self,
        in_features: int,
        sections: Mapping[str, Cut],
        *,
        bias: bool = False,
        after_sum: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """after_sum: the input comes from a sum over several ranks, so the first of the weight is read while
        they wait for each other."""
        super().__init__()
        self.after_sum = after_sum
        rows = sum(cut.count for cut in sections.values())
        self.section_sizes = tuple(cut.count for cut in sections.values())
        self.weight = ShardedParameter(_empty_weight(rows, in_features, dtype, device), sections)
        self.bias = None
        if bias:
            self.bias = ShardedParameter(torch.empty(rows, dtype=dtype, device=device), sections, init="bias")

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in_features]. Returns [T, rows of this rank], sections side by side, in `out` if given."""
        if self.bias is None or out is None:
            return linear(x, self.weight, self.bias, out=out, dependent=True, read_ahead=self.after_sum)
        return out.copy_(linear(x, self.weight, self.bias, dependent=True, read_ahead=self.after_sum))


class ColumnParallelLinear(FusedColumnLinear):
    """One projection, its rows cut evenly."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: TensorParallelGroup,
        *,
        what: str = "out_features",
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        divide(what, out_features, group.size)
        cut = even(out_features, group.rank, group.size)
        super().__init__(in_features, {"": cut}, bias=bias, dtype=dtype, device=device)


class MergedColumnParallelLinear(FusedColumnLinear):
    """Several projections of one input, the rows of each cut evenly; `sections`: name -> its rows."""

    def __init__(
        self,
        in_features: int,
        sections: Mapping[str, int],
        group: TensorParallelGroup,
        *,
        what: str = "out_features",
        bias: bool = False,
        after_sum: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for total in sections.values():
            divide(what, total, group.size)
        cuts = {name: even(total, group.rank, group.size) for name, total in sections.items()}
        super().__init__(in_features, cuts, bias=bias, after_sum=after_sum, dtype=dtype, device=device)


class GateUpLinear(MergedColumnParallelLinear):
    """silu(gate_proj(x)) * up_proj(x): both projections of a gated MLP and what joins them."""

    def __init__(
        self,
        in_features: int,
        intermediate_size: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sections = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        super().__init__(
            in_features,
            sections,
            group,
            what="intermediate_size",
            after_sum=group.size > 1,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features]. Returns [T, this rank's part of intermediate_size]."""
        return linear_silu_and_mul(x, self.weight, dependent=True, read_ahead=self.after_sum)


class QKVParallelLinear(FusedColumnLinear):
    """q_proj, k_proj and v_proj of full attention in one product: [q heads | gate heads | k heads | v heads].

    The checkpoint's q_proj rows are, per head, `q | gate`; they are loaded as all q, then all gates, so that
    both are plain views. KV heads that several ranks need are held by each of them.
    """

    def __init__(
        self,
        in_features: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        head_dim: int,
        shard: HeadShard,
        *,
        output_gate: bool,
        bias: bool,
        after_sum: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        q_width = head_dim * (2 if output_gate else 1)
        q_ranges = head_ranges(shard.heads, q_width, head_dim)
        if output_gate:
            q_ranges += head_ranges(shard.heads, q_width, head_dim, base=head_dim)
        kv = Cut(total_num_kv_heads * head_dim, head_ranges(shard.shared_heads, head_dim, head_dim))
        sections = {"q_proj": Cut(total_num_heads * q_width, q_ranges), "k_proj": kv, "v_proj": kv}
        super().__init__(in_features, sections, bias=bias, after_sum=after_sum, dtype=dtype, device=device)
        q_dim = shard.num_heads * head_dim
        self.split_sizes = [q_dim] * (2 if output_gate else 1) + [kv.count, kv.count]


class RowParallelLinear(Layer):
    """y = x W^T (+ b) (+ residual), where a rank holds the columns of W that its part of x meets."""

    def __init__(
        self,
        columns: Cut,
        out_features: int,
        group: TensorParallelGroup,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group = group
        weight = _empty_weight(out_features, columns.count, dtype, device)
        self.weight = ShardedParameter(weight, {"": columns}, dim=1)
        self.bias = None
        if bias:
            data = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = ShardedParameter(data, {"": whole(out_features)}, init="bias")

    def forward_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, columns of this rank]; residual: [T, out_features]. Returns (residual + the sum over the
        ranks, its norm). On a GPU the residual may be overwritten.
        """
        return sum_and_norm(self.group, partial(self._part, x), residual, norm)

    def begin(self, x: torch.Tensor, residual: torch.Tensor) -> BegunSum:
        """As `forward_and_norm`, but what is begun here is ended later."""
        return begin_sum(self.group, partial(self._part, x), residual)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, columns of this rank]. Returns the sum over the ranks, [T, out_features]."""
        return self.group.all_reduce(self._part(x, None))

    def _part(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        # the bias is whole on every rank, so one rank alone adds it before the sum
        bias = self.bias if self.group.rank == 0 else None
        return linear(x, self.weight, bias, residual, consume_residual=x.is_cuda, dependent=True)


def _empty_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled weight [rows, columns], in the memory order that is fastest there.

    On a CPU that is by columns: the products of 1 to 64 tokens took 0.6 to 0.9 of the time, and those of 256
    and more the same.
    """
    if device.type == "cpu":
        return torch.empty(columns, rows, dtype=dtype, device=device).t()
    return torch.empty(rows, columns, dtype=dtype, device=device)
