"""What paged prefill and decode share: rows out of pages, scores, the step of an online softmax."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def load_rows(
    pages, ids, offsets, cols, limit, dims, stride_page, stride_token, D: tl.constexpr, MASK: tl.constexpr
):
    """Rows [BLOCK_N, BLOCK_D] of one KV head: token `offsets` of page `ids`; zero where cols >= limit."""
    rows = ids.to(tl.int64) * stride_page + offsets * stride_token
    pointers = pages + rows[:, None] + dims[None, :]
    if MASK:
        return tl.load(pointers, mask=(cols < limit)[:, None] & (dims < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def scores_of(q, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, IEEE: tl.constexpr):
    """q [BLOCK_M, BLOCK_D] times k [BLOCK_N, BLOCK_D] transposed, fp32."""
    if not IEEE:
        return tl.dot(q, tl.trans(k))
    # one chain of fp32 additions over all dims would err more than cuBLAS does: shorter ones
    parts: tl.constexpr = 4 if BLOCK_D >= 64 else 1
    q = tl.permute(tl.reshape(q, [BLOCK_M, parts, BLOCK_D // parts]), (1, 0, 2))
    k = tl.permute(tl.reshape(k, [BLOCK_N, parts, BLOCK_D // parts]), (1, 2, 0))
    return tl.sum(tl.dot(q, k, input_precision="ieee"), 0)


@triton.jit
def online_softmax(scores, peak, total, qk_scale):
    """One block of scores [M, N] (before scaling; -inf where hidden) into the running maximum and sum [M].

    Returns weights [M, N], the factor that shrinks what was summed before, the new maximum, the new sum.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
    weights = tl.exp2(scores * qk_scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)
