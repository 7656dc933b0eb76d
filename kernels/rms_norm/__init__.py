"""Root-mean-square norms: plain, zero-centred, and gated."""

from hybridserve.kernels.rms_norm.cpu import rms_norm, rms_norm_gated

__all__ = ["rms_norm", "rms_norm_gated"]
