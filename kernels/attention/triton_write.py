"""New keys and values into their pages, both in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    k, v, key_slots, value_slots, slot_mapping, num_tokens,
    k_token, k_head, v_token, v_head, key_slot, key_head, value_slot, value_head,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    dims = tl.arange(0, BLOCK_W)
    heads, dims = dims // D, dims % D
    mask = (slots >= 0)[:, None] & (heads * D + dims < WIDTH)[None, :]
    tokens = tokens.to(tl.int64)
    source = tokens[:, None] * k_token + (heads * k_head + dims)[None, :]
    target = slots[:, None] * key_slot + (heads * key_head + dims)[None, :]
    tl.store(key_slots + target, tl.load(k + source, mask=mask).to(key_slots.dtype.element_ty), mask=mask)
    source = tokens[:, None] * v_token + (heads * v_head + dims)[None, :]
    target = slots[:, None] * value_slot + (heads * value_head + dims)[None, :]
    tl.store(value_slots + target, tl.load(v + source, mask=mask).to(value_slots.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store k, v [T, Hkv, D] at rows slot_mapping (int64 [T]) of key_slots, value_slots [slots, Hkv, D].

    A token whose slot is negative (padding of a CUDA graph) is not stored.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    width = num_kv_heads * head_dim
    block_w = triton.next_power_of_2(width)
    block_t = max(1, 4096 // block_w)
    _write_kernel[(triton.cdiv(num_tokens, block_t),)](
        k, v, key_slots, value_slots, slot_mapping, num_tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        key_slots.stride(0), key_slots.stride(1), value_slots.stride(0), value_slots.stride(1),
        D=head_dim, WIDTH=width, BLOCK_W=block_w, BLOCK_T=block_t, num_warps=4,
    )  # fmt: skip
