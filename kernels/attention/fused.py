"""Prefill by cuDNN's attention, the fastest of PyTorch's fused operators; context is gathered from pages.

cuDNN builds a plan for every new shape (46 ms on one H200), so few shapes are made: the new tokens of one
sequence, causal, and full blocks of CONTEXT_PIECE earlier tokens, not causal, merged by their log-sums. What
is left of the context goes with the new tokens through Triton. Knows nothing of how pages are handed out.
"""

import torch

from hybridserve.kernels.attention import triton_prefill
from hybridserve.kernels.attention.choice import CONTEXT_PIECE
from hybridserve.kernels.attention.triton_merge import merge_


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
    page_size = keys.shape[1]
    pieces, rest = divmod(context_len, CONTEXT_PIECE)
    if not rest:
        out, lse = _cudnn(q, k, v, scale, causal=True)
    else:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = triton_prefill.attention_prefill(
            q, k, v, keys, values,
            block_table[None, pieces * CONTEXT_PIECE // page_size :],
            (q.shape[0],), (rest,), scale=scale, lse=lse,
        )  # fmt: skip
    if not pieces:
        return out.contiguous()
    merged, lse = out.float().contiguous(), lse.contiguous()
    per_piece = CONTEXT_PIECE // page_size
    for piece in range(pieces):
        pages = block_table[piece * per_piece : (piece + 1) * per_piece]
        part, part_lse = _cudnn(q, _gather(keys, pages), _gather(values, pages), scale, causal=False)
        merge_(merged, lse, part, part_lse)
    return merged.to(q.dtype)


def _gather(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """All tokens of these pages, [tokens, Hkv, D]."""
    return pages.index_select(0, table).flatten(0, 1)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [L, H, D] of q to k, v [n, Hkv, D], and log(sum(exp(scores))), fp32 [L, H]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].flatten(1).T
