"""Gates where their input lies: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.activation import cpu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up, [T, I]. Computed in fp32, in the dtype of the input."""
    if gate_up.is_cuda:
        from hybridserve.kernels.activation import triton_gates

        return triton_gates.silu_and_mul(gate_up)
    return cpu.silu_and_mul(gate_up)


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), both [T, C] of one dtype. Computed in fp32, in their dtype."""
    if x.is_cuda:
        from hybridserve.kernels.activation import triton_gates

        return triton_gates.sigmoid_and_mul(x, gate)
    return cpu.sigmoid_and_mul(x, gate)
