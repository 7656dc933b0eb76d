"""Experts of few tokens on the GPU, without a sort: two launches that stream each choice's weights once.

Where the GPU can, each launch begins while the one before ends, and waits for it before it reads anything.
The first computes silu(gate) * up of every (token, slot), the second every output row, summed over the slots
in their order, with the residual. A token's result does not depend on the tokens beside it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridserve.kernels.hopper import has_dependent_launches


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w13_ptr,
    ids_ptr,
    act_ptr,
    x_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    SLOTS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    choice = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * BLOCK_I + tl.arange(0, BLOCK_I)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + choice).to(tl.int64)
    if expert >= 0:
        x_row = x_ptr + choice // SLOTS * x_stride
        gate_rows = w13_ptr + expert * (2 * I * H) + rows[:, None] * H
        gate = tl.zeros([BLOCK_I, BLOCK_H], dtype=tl.float32)
        up = tl.zeros([BLOCK_I, BLOCK_H], dtype=tl.float32)
        for start in tl.static_range(0, H, BLOCK_H):
            cols = start + tl.arange(0, BLOCK_H)
            mask = (rows < I)[:, None] & (cols < H)[None, :]
            w_gate = tl.load(gate_rows + cols[None, :], mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
            w_up = tl.load(
                gate_rows + I * H + cols[None, :], mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            x = tl.load(x_row + cols, cols < H, other=0.0).to(tl.float32)
            gate += w_gate * x[None, :]
            up += w_up * x[None, :]
        g = tl.sum(gate, 1)
        act = g / (1 + tl.exp(-g)) * tl.sum(up, 1)
        tl.store(act_ptr + choice * I + rows, act.to(act_ptr.dtype.element_ty), rows < I)


@triton.jit
def _down_kernel(
    act_ptr,
    w2_ptr,
    weights_ptr,
    ids_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_H, BLOCK_I], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        choice = token * SLOTS + slot
        expert = tl.load(ids_ptr + choice).to(tl.int64)
        chosen = expert >= 0
        weight = tl.load(weights_ptr + choice)
        expert_rows = w2_ptr + tl.maximum(expert, 0) * (H * I) + rows[:, None] * I
        for start in tl.static_range(0, I, BLOCK_I):
            cols = start + tl.arange(0, BLOCK_I)
            mask = (rows < H)[:, None] & ((cols < I) & chosen)[None, :]
            w = tl.load(expert_rows + cols[None, :], mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
            act = tl.load(act_ptr + choice * I + cols, (cols < I) & chosen, other=0.0).to(tl.float32)
            acc += w * (act * weight)[None, :]
    out = tl.sum(acc, 1)
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + token * residual_stride + rows, rows < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + rows, out.to(out_ptr.dtype.element_ty), rows < H)


# (rows of gate, and of up, a program; columns a load; warps), then (output rows; channels a load; warps)
UP = (2, 2048, 4)
DOWN = (4, 512, 2)


def moe_experts_direct(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As `dispatch.moe_experts`, for any number of tokens, meant for 1 to 8."""
    tokens, hidden = x.shape
    slots, size = ids.shape[1], w2.shape[2]
    act = torch.empty(tokens * slots, size, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    pdl = has_dependent_launches(x.device)
    block_i, block_h, num_warps = UP
    _gate_up_kernel[(tokens * slots * triton.cdiv(size, block_i),)](
        x,
        w13,
        ids,
        act,
        x.stride(0),
        H=hidden,
        I=size,
        SLOTS=slots,
        BLOCK_I=block_i,
        BLOCK_H=min(block_h, triton.next_power_of_2(hidden)),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    block_h, block_i, num_warps = DOWN
    own = x if residual is None else residual
    _down_kernel[(tokens * triton.cdiv(hidden, block_h),)](
        act,
        w2,
        weights,
        ids,
        own,
        out,
        own.stride(0),
        H=hidden,
        I=size,
        SLOTS=slots,
        BLOCK_H=block_h,
        BLOCK_I=min(block_i, triton.next_power_of_2(size)),
        HAS_RESIDUAL=residual is not None,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return out
