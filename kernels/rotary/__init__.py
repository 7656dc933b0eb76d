"""Rotary position embedding of a head's leading dims, in the half-split order."""

from hybridserve.kernels.rotary.cpu import apply_rotary
from hybridserve.kernels.rotary.dispatch import qk_norm_rope_write, rotary_cos_sin

__all__ = ["apply_rotary", "qk_norm_rope_write", "rotary_cos_sin"]
