"""Causal attention of one sequence, written out: the truth for the fast paths. Knows no pages."""

import torch


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """The last L tokens of a sequence of n attend to all up to themselves; in the dtype of q.

    q: [L, H, D]. k, v: [n, Hkv, D], n >= L. Head h reads KV head h // (H // Hkv). Returns [L, H, D].
    window: a token attends to this many tokens up to itself; None: to all.
    """
    num_queries, num_heads, _ = q.shape
    num_keys = k.shape[0]
    group = num_heads // k.shape[1]
    cols = torch.arange(num_keys, device=q.device)
    positions = cols[num_keys - num_queries :, None]
    visible = cols <= positions
    if window is not None:
        visible &= positions - cols < window
    out = torch.empty_like(q)
    for h in range(num_heads):
        scores = q[:, h] @ k[:, h // group].T * scale
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), 1)
        out[:, h] = weights @ v[:, h // group]
    return out
