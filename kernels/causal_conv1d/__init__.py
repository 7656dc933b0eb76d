"""Causal depthwise convolution over time with silu, with the last inputs of a sequence kept in a ring."""

from hybridserve.kernels.causal_conv1d.cpu import make_phase_weight
from hybridserve.kernels.causal_conv1d.dispatch import (
    causal_conv1d_decode,
    causal_conv1d_prefill,
    causal_conv1d_prefill_split,
)

__all__ = [
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "causal_conv1d_prefill_split",
    "make_phase_weight",
]
