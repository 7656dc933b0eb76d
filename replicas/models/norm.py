"""RMSNorm modules over the rms_norm kernels."""

import torch

from hybridserve.kernels.rms_norm import rms_norm, rms_norm_gated, rms_norm_gated_given, sum_of_squares
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.weights.parameter import Cut, ShardedParameter, whole


class ZeroCentredRMSNorm(Layer):
    """x / rms(x) * (1 + w), where the checkpoint holds w. The parameter holds 1 + w in fp32."""

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        data = torch.empty(size, dtype=torch.float32, device=device)
        self.weight = ShardedParameter(data, {"": whole(size)}, shift=1.0, init="norm_around_zero")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]; the same shape and dtype come back."""
        return rms_norm(x, self.weight, self.eps, zero_centered=False, dependent=True)


class GatedRMSNorm(Layer):
    """x / rms(x) * w * silu(gate): norm first, then gate, and w as it is stored."""

    def __init__(self, size: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        data = torch.empty(size, dtype=torch.float32, device=device)
        self.weight = ShardedParameter(data, {"": whole(size)}, init="norm_around_one")

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate: [..., size]."""
        return rms_norm_gated(x, gate, self.weight, self.eps)


class PartialGatedRMSNorm(Layer):
    """`GatedRMSNorm` over heads whose channels are cut over ranks: their sums of squares are added up first.

    The sums of all the model's heads are one small all-reduce, in which a rank leaves those of heads it has
    no part of at zero; so no rank needs a group of its own with the ranks that share its heads.
    """

    def __init__(
        self,
        channels: Cut,
        total_num_heads: int,
        first_head: int,
        eps: float,
        group: TensorParallelGroup,
        *,
        device: torch.device,
    ) -> None:
        """channels: those that the rank holds of each of its heads, the first of which is `first_head`."""
        super().__init__()
        self.eps, self.group = eps, group
        self.size, self.total_num_heads, self.first_head = channels.total, total_num_heads, first_head
        data = torch.empty(channels.count, dtype=torch.float32, device=device)
        self.weight = ShardedParameter(data, {"": channels}, init="norm_around_one")

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate: [T, num_heads, channels of this rank]."""
        own = slice(self.first_head, self.first_head + x.shape[1])
        squares = sum_of_squares(x)
        if x.shape[1] < self.total_num_heads:
            every = squares.new_zeros(x.shape[0], self.total_num_heads)
            every[:, own] = squares
            squares = every
        squares = self.group.all_reduce(squares)[:, own]
        return rms_norm_gated_given(x, gate, self.weight, self.eps, squares, self.size)
