"""`take_drawn` and `keep_drawn` in one launch each, for CUDA graphs of steps that feed one another."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _take_kernel(token_ids, drawn, sources, out, num_tokens, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_tokens
    source = tl.load(sources + at, mask, other=-1)
    known = tl.load(token_ids + at, mask & (source < 0), other=0)
    tl.store(out + at, tl.load(drawn + source, mask & (source >= 0), other=0) + known, mask)


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def _keep_kernel(tokens, finite, kept, num_rows, row_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_rows
    tl.store(kept + at, tl.load(tokens + at, mask, other=0), mask)
    tl.store(kept + row_stride + at, tl.load(finite + at, mask, other=0).to(tl.int64), mask)


def take_drawn(token_ids: torch.Tensor, drawn: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """See the folder's `take_drawn`."""
    out = torch.empty_like(token_ids)
    num_tokens = token_ids.shape[0]
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        _take_kernel[grid](token_ids, drawn, sources, out, num_tokens, BLOCK=BLOCK)
    return out


def keep_drawn(tokens: torch.Tensor, finite: torch.Tensor, kept: torch.Tensor) -> None:
    """See the folder's `keep_drawn`."""
    num_rows = tokens.shape[0]
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK),)
        _keep_kernel[grid](tokens, finite, kept, num_rows, kept.stride(0), BLOCK=BLOCK)
