"""Products with a weight, where decode steps spend their time: alone, onto a residual, and into a gate."""

from hybridserve.kernels.linear.dispatch import linear, linear_silu_and_mul

__all__ = ["linear", "linear_silu_and_mul"]
