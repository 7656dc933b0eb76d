"""Routing on the GPU: softmax, the top experts and the shared expert's gate, one launch, a warp a token."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridserve.kernels.hopper import has_dependent_launches

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(bits):
    """fp32 bits as integers that compare as the numbers do, and back again."""
    return tl.where(bits < 0, bits ^ INT_MAX, bits)


@triton.jit(do_not_specialize_on_alignment=["row_index_ptr"])
def _route_kernel(
    logits_ptr,
    row_index_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    slots = tl.arange(0, BLOCK_S)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(logits_ptr + row * logits_stride + NUM_EXPERTS).to(tl.float32)
    logits = tl.load(logits_ptr + row * logits_stride + experts, experts < NUM_EXPERTS, other=-float("inf"))
    # the sum makes one zero of two
    logits = logits.to(tl.float32) + 0.0
    # integers, whose largest a warp finds in one instruction; 31 bits of NaN sort above all numbers
    keys = _ordered(logits.to(tl.int32, bitcast=True))
    keys = tl.where(experts < NUM_EXPERTS, keys, INT_MIN)
    ids = tl.full([BLOCK_S], NUM_EXPERTS, tl.int32)
    best_keys = tl.full([BLOCK_S], INT_MIN, tl.int32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        expert = tl.min(tl.where(keys == best, experts, BLOCK_E), 0)
        ids = tl.where(slots == slot, expert, ids)
        best_keys = tl.where(slots == slot, best, best_keys)
        keys = tl.where(experts == expert, INT_MIN, keys)
    routed = slots < TOP_K
    chosen = _ordered(best_keys).to(tl.float32, bitcast=True)
    largest = tl.max(tl.where(routed, chosen, -float("inf")), 0)
    weights = tl.exp(tl.where(routed, chosen - largest, -float("inf")))
    total = tl.sum(weights, 0) if NORMALIZE else tl.sum(tl.exp(logits - largest), 0)
    weights = tl.where(routed, weights / total, 1 / (1 + tl.exp(-gate)))
    if HAS_ROW_INDEX:
        real = tl.load(row_index_ptr + row) >= 0
        weights = tl.where(real, weights, 0.0)
        ids = tl.where(real, ids, -1)
    at = row * (TOP_K + 1) + slots
    tl.store(weights_ptr + at, weights, slots <= TOP_K)
    tl.store(ids_ptr + at, ids, slots <= TOP_K)


def moe_route(
    logits: torch.Tensor,
    num_experts: int,
    top_k: int,
    *,
    normalize: bool,
    row_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.moe_route`."""
    assert logits.stride(1) == 1 and 0 < top_k <= num_experts < logits.shape[1]
    tokens = logits.shape[0]
    weights = torch.empty(tokens, top_k + 1, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k + 1, dtype=torch.int32, device=logits.device)
    block_e = triton.next_power_of_2(num_experts)
    pdl = has_dependent_launches(logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            logits if row_index is None else row_index,
            weights,
            ids,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            BLOCK_E=block_e,
            BLOCK_S=triton.next_power_of_2(top_k + 1),
            NORMALIZE=normalize,
            HAS_ROW_INDEX=row_index is not None,
            PDL=pdl,
            num_warps=1 if block_e <= 512 else 2,
            launch_pdl=pdl,
        )
    return weights, ids
