"""Causal attention of one sequence, written out: the truth for the fast paths. Knows no pages."""

import torch


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """The last L tokens of a sequence of n attend to all up to themselves; in the dtype of q.

    q: [L, H, D]. k, v: [n, Hkv, D], n >= L. Head h reads KV head h // (H // Hkv). Returns [L, H, D].
    """
    num_queries, num_heads, _ = q.shape
    num_keys = k.shape[0]
    group = num_heads // k.shape[1]
    out = torch.empty_like(q)
    for t in range(num_queries):
        visible = num_keys - num_queries + t + 1
        for h in range(num_heads):
            keys, values = k[:visible, h // group], v[:visible, h // group]
            weights = torch.softmax(keys @ q[t, h] * scale, 0)
            out[t, h] = weights @ values
    return out
