"""Rotary embedding as a rotation of pairs, one pair at a time: the truth the fast path is tested against."""

import math

import torch


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    """x [T, H, D]; dims (i, i + rotary_dim / 2) turn by position * theta ** (-2i / rotary_dim)."""
    out = x.clone()
    half = rotary_dim // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            out[t, :, i] = x[t, :, i] * cos - x[t, :, i + half] * sin
            out[t, :, i + half] = x[t, :, i + half] * cos + x[t, :, i] * sin
    return out
