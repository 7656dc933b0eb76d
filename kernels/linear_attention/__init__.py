"""Linear attention with a matrix state: decay per head, per key channel or none; delta rule or not."""

from hybridserve.kernels.linear_attention.dispatch import (
    gdn_decode_fused,
    gdn_decode_replay,
    gdn_gates,
    linear_attention_decode,
    linear_attention_prefill,
)

__all__ = [
    "gdn_decode_fused",
    "gdn_decode_replay",
    "gdn_gates",
    "linear_attention_decode",
    "linear_attention_prefill",
]
