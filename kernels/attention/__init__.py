"""Softmax attention over a paged KV cache."""

from hybridserve.kernels.attention.choice import (
    CONTEXT_PIECES,
    FUSED_LENGTHS,
    attention_decode,
    attention_prefill,
    build_plans,
    fused_length,
    write_kv,
)

__all__ = [
    "CONTEXT_PIECES",
    "FUSED_LENGTHS",
    "attention_decode",
    "attention_prefill",
    "build_plans",
    "fused_length",
    "write_kv",
]
