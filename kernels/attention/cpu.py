"""Attention on the CPU over pages: gather a sequence's own keys and values, then PyTorch's fused attention.

Only tokens inside a sequence's length are ever read into a product: what lies in a page's unused tail or in
another sequence's page may be NaN. Knows nothing of how pages are handed out.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

# query rows of one masked call: bounds the mask's memory and skips keys no row of the block may see
QUERY_BLOCK = 256


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store k, v [T, Hkv, D] at rows slot_mapping (int64 [T]) of key_slots, value_slots [slots, Hkv, D]."""
    key_slots.index_copy_(0, slot_mapping, k.to(key_slots.dtype))
    value_slots.index_copy_(0, slot_mapping, v.to(value_slots.dtype))


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of S sequences' new tokens, laid end to end, to their earlier tokens and themselves.

    q: [T, H, D]. k, v: [T, Hkv, D], this step's keys and values (in the pages too).
    keys, values: [N, page_size, Hkv, D]. block_tables: int64 [S, max_pages], rows of keys of each sequence.
    query_lens, context_lens: tokens of each sequence now and before.
    window: a token attends to this many tokens up to itself; None: to all.
    Returns [T, H, D] in the dtype of q.
    """
    assert sum(query_lens) == q.shape[0] and len(query_lens) == len(context_lens)
    out = torch.empty_like(q)
    start = 0
    for s, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        end = start + length
        if length:
            k_all, v_all = k[start:end], v[start:end]
            if context:
                k_all = torch.cat((_gather(keys, block_tables[s], context), k_all))
                v_all = torch.cat((_gather(values, block_tables[s], context), v_all))
            _causal(q[start:end], k_all, v_all, scale, window, out[start:end])
        start = end
    return out


def attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One token of each of B sequences attends to all of its sequence.

    q: [B, H, D]. keys, values: [N, page_size, Hkv, D].
    block_tables: int64 [B, max_pages].
    seq_lens: tokens of each sequence with the new one, whose key and value are in the pages already.
        0: a padded row, which reads no page and becomes zero.
    window: only the last `window` tokens are seen.
    Returns [B, H, D] in the dtype of q.
    """
    if not seq_lens:
        return torch.empty_like(q)
    num_kv_heads, head_dim = keys.shape[2:]
    # the heads that share a KV head become query rows of it
    grouped = q.view(q.shape[0], 1, num_kv_heads, -1, head_dim)
    out = torch.empty_like(grouped)
    # one call a sequence: padding 16 ragged sequences to one batch took 1.3 times as long, and saved a tenth
    # where all were equally long
    for b, (k, v) in enumerate(_gather_all(keys, values, block_tables, seq_lens)):
        if not seq_lens[b]:
            out[b] = 0
            continue
        if window is not None:
            k, v = k[:, :, -window:], v[:, :, -window:]
        out[b] = F.scaled_dot_product_attention(grouped[b], k, v, scale=scale)
    return out.view(q.shape)


def _gather_all(
    keys: torch.Tensor, values: torch.Tensor, block_tables: torch.Tensor, seq_lens: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each sequence, [1, Hkv, seq_len, D]; all pages are gathered at once."""
    page_size = keys.shape[1]
    counts = [-(-length // page_size) for length in seq_lens]
    pages = torch.cat([table[:count] for table, count in zip(block_tables, counts, strict=True)])
    k_all = keys.index_select(0, pages).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    v_all = values.index_select(0, pages).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    at = 0
    for count, length in zip(counts, seq_lens, strict=True):
        yield k_all[:, :, at : at + length], v_all[:, :, at : at + length]
        at += count * page_size


def _gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, [length, Hkv, D]."""
    num_pages = -(-length // pages.shape[1])
    return pages.index_select(0, table[:num_pages]).flatten(0, 1)[:length]


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """out = attention of q [L, H, D], the last L of the n tokens of k, v [n, Hkv, D]."""
    length, context = q.shape[0], k.shape[0] - q.shape[0]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if not context and window is None:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(attended[0].transpose(0, 1))
        return
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        visible = context + end
        mask = torch.ones(end - start, visible, dtype=torch.bool, device=q.device).tril_(context + start)
        if window is not None:
            mask.triu_(context + start - window + 1)
        attended = F.scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, :visible], v[:, :, :visible], mask, scale=scale, enable_gqa=True
        )
        out[start:end] = attended[0].transpose(0, 1)
