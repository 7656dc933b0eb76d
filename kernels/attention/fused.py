"""Prefill by cuDNN's attention, the fastest of PyTorch's fused operators; context is gathered from pages.

cuDNN builds a plan for every new shape (46 ms on one H200), so few shapes are made: the new tokens of one
sequence, filled up to one of FUSED_LENGTHS, causal, and blocks of CONTEXT_PIECES earlier tokens, not causal,
merged by their log-sums. What is left of the context goes with the new tokens through Triton. Knows nothing
of how pages are handed out.
"""

from collections.abc import Sequence

import torch

from hybridserve.kernels.attention import triton_prefill
from hybridserve.kernels.attention.choice import CONTEXT_PIECES, fused_length
from hybridserve.kernels.attention.triton_merge import merge_
from hybridserve.kernels.compilation import is_recording


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one sequence's new tokens to its earlier tokens and themselves.

    q: [L, H, D]. k, v: [L, Hkv, D], this step's keys and values; they must be in the pages too.
    keys, values: [N, page_size, Hkv, D]. block_table: int32 or int64 [max_pages].
    context_len: earlier tokens, in the pages.
    Half-precision dtypes only. Returns [L, H, D] in the dtype of q.
    """
    count, page_size = q.shape[0], keys.shape[1]
    length = fused_length(count) or count
    pieces, rest = _pieces(context_len)
    filled = _filled(q, length)
    if not rest:
        # keys behind the last real token are seen by rows of filling alone
        out, lse = _cudnn(filled, _filled(k, length), _filled(v, length), scale, causal=True)
        out, lse = out[:count], lse[:count]
    else:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = triton_prefill.attention_prefill(
            q, k, v, keys, values,
            block_table[None, sum(pieces) // page_size :],
            (q.shape[0],), (rest,), scale=scale, lse=lse,
        )  # fmt: skip
    if not pieces:
        return out.contiguous()
    merged, lse = out.float().contiguous(), lse.contiguous()
    first = 0
    for piece in pieces:
        pages = block_table[first : first + piece // page_size]
        first += piece // page_size
        part, part_lse = _cudnn(filled, _gather(keys, pages), _gather(values, pages), scale, causal=False)
        merge_(merged, lse, part[:count], part_lse[:count])
    return merged.to(q.dtype)


def build_plans(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int],
    pieces: Sequence[int],
) -> None:
    """Have cuDNN's plans for these numbers of new tokens, and for pieces of context before them."""

    def zeros(tokens: int, heads: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device)

    for length in lengths:
        q, new = zeros(length, num_heads), zeros(length, num_kv_heads)
        _cudnn(q, new, new, 1.0, causal=True)
        for piece in pieces:
            context = zeros(piece, num_kv_heads)
            _cudnn(q, context, context, 1.0, causal=False)


def _pieces(context_len: int) -> tuple[list[int], int]:
    """The pieces of a context, from its start, and how many tokens are in none."""
    pieces = []
    for size in CONTEXT_PIECES:
        count, context_len = divmod(context_len, size)
        pieces += [size] * count
    return pieces, context_len


def _filled(x: torch.Tensor, length: int) -> torch.Tensor:
    """x [L, ...] with zeros behind, [length, ...], dense: cuDNN builds a plan for other strides, too."""
    if x.shape[0] == length:
        return x.contiguous()
    out = x.new_zeros(length, *x.shape[1:])
    out[: x.shape[0]] = x
    return out


def _gather(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """All tokens of these pages, [tokens, Hkv, D]."""
    return pages.index_select(0, table).flatten(0, 1)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [L, H, D] of q to k, v [n, Hkv, D], and log(sum(exp(scores))), fp32 [L, H]."""
    if is_recording():
        # a plan may take a second to build, which can be done while kernels compile
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].flatten(1).T
