"""The gated feed-forward half of a layer."""

import torch

from hybridserve.kernels.activation import silu_and_mul
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from hybridserve.parallel.weights.parameter import even


class GatedMLP(Layer):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), cut by intermediate channels."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            group,
            what="intermediate_size",
            dtype=dtype,
            device=device,
        )
        columns = even(intermediate_size, group.rank, group.size)
        self.down_proj = RowParallelLinear(columns, hidden_size, group, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [T, hidden_size]. Returns residual + mlp(x)."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)), residual)
