"""Activations of gated MLPs."""

from hybridserve.kernels.activation.cpu import silu_and_mul

__all__ = ["silu_and_mul"]
