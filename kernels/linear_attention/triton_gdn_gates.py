"""The gates of Gated DeltaNet for many tokens, in one launch. Knows nothing of the recurrence."""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.linear_attention.triton_decode_parts import exp_exact, softplus

TILE = 1024


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["a_ptr", "b_ptr"])
def _gdn_gates_kernel(
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    num_tokens,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
):
    tokens = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    heads = tl.arange(0, BLOCK_H)[None, :]
    known = heads < HEADS
    mask = (tokens < num_tokens) & known
    a = tl.load(a_ptr + tokens * a_stride + heads, mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + tokens * b_stride + heads, mask, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + heads, known, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, known, other=0.0).to(tl.float32)
    at = tokens * HEADS + heads
    # a head's decay has one factor for all tokens: its error would not average out
    tl.store(g_ptr + at, -exp_exact(a_log) * softplus(a + dt_bias), mask)
    tl.store(beta_ptr + at, 1 / (1 + tl.exp(-b)), mask)


def gdn_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log decay and write strength of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464).

    a, b: [T, Hv], any float dtype, the last axis dense. A_log, dt_bias: [Hv].
    Returns g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b), fp32 [2, T, Hv], in `out` if given.
    """
    assert a.shape == b.shape and a.stride(1) == b.stride(1) == 1
    num_tokens, heads = a.shape
    if out is None:
        out = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=a.device)
    assert out.shape == (2, num_tokens, heads) and out.is_contiguous() and out.dtype == torch.float32
    block = triton.next_power_of_2(heads)
    rows = max(1, TILE // block)
    if num_tokens:
        _gdn_gates_kernel[(triton.cdiv(num_tokens, rows),)](
            a,
            b,
            A_log,
            dt_bias,
            *out,
            num_tokens,
            a.stride(0),
            b.stride(0),
            HEADS=heads,
            BLOCK_H=block,
            ROWS=rows,
            num_warps=4,
        )
    return out
