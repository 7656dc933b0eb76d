"""RMSNorm modules over the rms_norm kernels."""

import torch

from hybridserve.kernels.rms_norm import rms_norm, rms_norm_gated
from hybridserve.parallel.layers.layer import Layer
from hybridserve.parallel.weights.parameter import ShardedParameter, whole


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
