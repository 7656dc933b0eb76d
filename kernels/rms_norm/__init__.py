"""Root-mean-square norms: plain, zero-centred, after a residual add, and gated."""

from hybridserve.kernels.rms_norm.dispatch import (
    rms_norm,
    rms_norm_gated,
    rms_norm_gated_given,
    rms_norm_residual,
    sum_of_squares,
)

__all__ = ["rms_norm", "rms_norm_gated", "rms_norm_gated_given", "rms_norm_residual", "sum_of_squares"]
