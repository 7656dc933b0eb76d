"""Gated activations written out: the truth the fast path is tested against, in the dtype given."""

import torch


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up, [T, I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    return gate / (1 + torch.exp(-gate)) * up


def sigmoid_and_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), of one shape."""
    return x / (1 + torch.exp(-gate))
