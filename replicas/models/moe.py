"""The mixture-of-experts half of a layer: a router, experts, and one expert that all tokens share."""

from collections.abc import Iterator

import torch

from hybridserve.kernels.linear import linear
from hybridserve.kernels.moe import moe_experts, moe_route
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.heads import divide
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.sums import BegunSum, Summand, begin_sum, sum_and_norm
from hybridserve.parallel.peer_sums import Norm
from hybridserve.parallel.weights.grouped import GroupedParameter
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter, even, whole
from hybridserve.replicas.models.mlp import GatedMLP
from hybridserve.replicas.models.specs import MoESpec

# rows of a logits row that fast matrix products want to be a multiple of
ROW_STEP = 16


class SparseMoE(Layer):
    """sum of softmax weight * expert(x) over the top experts + sigmoid(shared gate) * shared expert(x).

    Weights of all experts are one tensor each, w13 [num_experts + 1, 2 * I, hidden] (gate rows, then up rows)
    and w2 [num_experts + 1, hidden, I], the shared expert last: to the kernels it is one more expert, which
    every token chooses. Cut by intermediate channels; the router is whole on every rank.

    Or cut by experts: a rank holds some of them whole, without the shared one, which stays cut by channels in
    `shared_expert` so that all ranks have the same to do for it. Either way one all-reduce sums everything.
    """

    def __init__(
        self,
        spec: MoESpec,
        hidden_size: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.group = spec, group
        total = spec.total_intermediate_size
        size = divide("moe_intermediate_size", total, group.size)
        self.by_experts = spec.split == "experts" and group.size > 1
        if self.by_experts:
            divide("num_experts", spec.num_experts, group.size)
            self.experts, self.cut = even(spec.num_experts, group.rank, group.size), whole(total)
            self.shared_expert = GatedMLP(hidden_size, total, group, dtype=dtype, device=device)
            held, size = self.experts.count, total
        else:
            self.experts, self.cut = whole(spec.num_experts), even(total, group.rank, group.size)
            held = spec.num_experts + 1
        experts = spec.num_experts + 1
        rows = -(-experts // ROW_STEP) * ROW_STEP
        # rows past the shared expert's gate are zeros: an odd width would keep the product from fast kernels
        padded = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.register_buffer("padded_router", padded, persistent=False)
        self.router = GroupedParameter(padded[:experts], self._pieces_of_router)
        w13 = torch.empty(held, 2 * size, hidden_size, dtype=dtype, device=device)
        w2 = torch.empty(held, hidden_size, size, dtype=dtype, device=device)
        self.w13 = GroupedParameter(w13, self._pieces_of_w13)
        self.w2 = GroupedParameter(w2, self._pieces_of_w2)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, hidden_size]. Returns (residual + moe(x), its norm).

        positions: [T]; rows where they are negative are padding, of which the residual alone comes back.
        """
        return sum_and_norm(self.group, self._part_of(x, positions), residual, norm)

    def begin(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor | None = None
    ) -> BegunSum:
        """As `forward`, but what is begun here is ended later."""
        return begin_sum(self.group, self._part_of(x, positions), residual)

    def _part_of(self, x: torch.Tensor, positions: torch.Tensor | None) -> Summand:
        return lambda residual: self._own_part(x, residual, positions)

    def _own_part(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """What this rank adds to the result: the ranks' parts are still to be summed."""
        logits = linear(x, self.padded_router, dependent=True)
        weights, ids = moe_route(
            logits,
            self.spec.num_experts,
            self.spec.top_k,
            normalize=self.spec.norm_topk_prob,
            # padding would have experts of its own read
            row_index=positions,
        )
        if not self.by_experts:
            return moe_experts(x, self.w13, self.w2, weights, ids, residual)
        routed, shared = weights[:, :-1].contiguous(), weights[:, -1:]
        y = moe_experts(x, self.w13, self.w2, routed, self._held(ids[:, :-1]), residual)
        return y + (self.shared_expert.own_part(x) * shared).to(y.dtype)

    def _held(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 [T, top_k] experts as numbers among the rank's own, or -1."""
        ((first, end),) = self.experts.ranges
        return torch.where((ids >= first) & (ids < end), ids - first, -1)

    def _pieces_of_router(self, data: torch.Tensor) -> Iterator[tuple[str, ShardedParameter]]:
        experts = self.spec.num_experts
        yield "gate.weight", ShardedParameter(data[:experts], {"": whole(experts)})
        yield "shared_expert_gate.weight", ShardedParameter(data[experts:], {"": whole(1)})

    def _pieces_of_w13(self, data: torch.Tensor) -> Iterator[tuple[str, ShardedParameter]]:
        experts, size = self.spec.num_experts, self.cut.count
        if self.spec.stacked and self.by_experts:
            yield "experts.gate_up_proj", self._whole_experts(data)
        elif self.spec.stacked:
            (rows,) = self.cut.ranges
            total = self.cut.total
            both = Cut(2 * total, (rows, (total + rows[0], total + rows[1])))
            yield (
                "experts.gate_up_proj",
                ShardedParameter(data[:experts], {"": both}, dim=1, init="stacked_weight"),
            )
        for name, expert in self._named(data):
            yield f"{name}.gate_proj.weight", ShardedParameter(expert[:size], {"": self.cut})
            yield f"{name}.up_proj.weight", ShardedParameter(expert[size:], {"": self.cut})

    def _pieces_of_w2(self, data: torch.Tensor) -> Iterator[tuple[str, ShardedParameter]]:
        if self.spec.stacked and self.by_experts:
            yield "experts.down_proj", self._whole_experts(data)
        elif self.spec.stacked:
            yield (
                "experts.down_proj",
                ShardedParameter(data[: self.spec.num_experts], {"": self.cut}, dim=2, init="stacked_weight"),
            )
        for name, expert in self._named(data):
            yield f"{name}.down_proj.weight", ShardedParameter(expert, {"": self.cut}, dim=1)

    def _named(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and weights of the experts that the checkpoint stores one by one."""
        if not self.spec.stacked:
            ((first, end),) = self.experts.ranges
            yield from ((f"experts.{e}", data[e - first]) for e in range(first, end))
        if not self.by_experts:
            yield "shared_expert", data[-1]

    def _whole_experts(self, data: torch.Tensor) -> ShardedParameter:
        return ShardedParameter(data, {"": self.experts}, init="stacked_weight")
