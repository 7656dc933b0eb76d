"""The gated feed-forward half of a layer."""

import torch

from hybridserve.kernels.linear import linear
from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.layers.linear import GateUpLinear, RowParallelLinear
from hybridserve.parallel.layers.sums import BegunSum
from hybridserve.parallel.peer_sums import Norm
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
        self.gate_up_proj = GateUpLinear(hidden_size, intermediate_size, group, dtype=dtype, device=device)
        columns = even(intermediate_size, group.rank, group.size)
        self.down_proj = RowParallelLinear(columns, hidden_size, group, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, hidden_size]. Returns (residual + mlp(x), its norm)."""
        return self.down_proj.forward_and_norm(self.gate_up_proj(x), residual, norm)

    def begin(self, x: torch.Tensor, residual: torch.Tensor) -> BegunSum:
        """As `forward`, but what is begun here is ended later."""
        return self.down_proj.begin(self.gate_up_proj(x), residual)

    def own_part(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's channels add to mlp(x): the ranks' parts are still to be summed."""
        return linear(self.gate_up_proj(x), self.down_proj.weight, dependent=True)
