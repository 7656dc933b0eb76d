"""Gates: the activations of gated MLPs, and the gate of an attention's output."""

from hybridserve.kernels.activation.dispatch import sigmoid_and_mul, silu_and_mul

__all__ = ["sigmoid_and_mul", "silu_and_mul"]
