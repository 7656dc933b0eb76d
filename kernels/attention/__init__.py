"""Softmax attention over a paged KV cache."""

from hybridserve.kernels.attention.choice import attention_decode, attention_prefill, write_kv

__all__ = ["attention_decode", "attention_prefill", "write_kv"]
