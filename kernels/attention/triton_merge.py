"""Attention over a part of the keys into attention over the parts before."""

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_kernel(
    out, lse, part, part_lse, part_token, part_head, lse_token, lse_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    token = (pid // H).to(tl.int64)
    head = pid % H
    dims = tl.arange(0, BLOCK_D)
    old = tl.load(lse + token * H + head)
    new = tl.load(part_lse + token * lse_token + head * lse_head)
    peak = tl.maximum(old, new)
    old_weight = tl.exp(old - peak)
    new_weight = tl.exp(new - peak)
    total = old_weight + new_weight
    pointers = out + (token * H + head) * D + dims
    x = tl.load(pointers, mask=dims < D, other=0.0)
    y = tl.load(part + token * part_token + head * part_head + dims, mask=dims < D, other=0.0).to(tl.float32)
    tl.store(pointers, (x * old_weight + y * new_weight) / total, mask=dims < D)
    tl.store(lse + token * H + head, peak + tl.log(total))


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part's attention into out and lse, in place.

    out: fp32 [T, H, D], lse: fp32 [T, H], contiguous: attention over some keys and log(sum(exp(scores))).
    part: [T, H, D], any dtype, part_lse: fp32 [T, H], any strides: the same over other keys.
    """
    num_tokens, num_heads, head_dim = out.shape
    assert out.is_contiguous() and lse.is_contiguous() and part.stride(2) == 1
    _merge_kernel[(num_tokens * num_heads,)](
        out, lse, part, part_lse,
        part.stride(0), part.stride(1), part_lse.stride(0), part_lse.stride(1),
        H=num_heads, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
