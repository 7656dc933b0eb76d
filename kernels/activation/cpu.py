"""Gated activations on the CPU: computed in fp32, returned in the dtype of the input."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), of one shape and dtype."""
    return gate.float().sigmoid_().mul_(x).to(x.dtype)
