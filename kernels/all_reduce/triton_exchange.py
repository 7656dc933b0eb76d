"""The sum of parts that other ranks have copied here: waits for them, adds them up, and norms the sum.

The sum is fp32 in the order of the ranks, so all ranks hold the same bits. Knows nothing of who copies.
"""

import torch
import triton
import triton.language as tl

from hybridserve.kernels.all_reduce.exchange import SLOTS, ExchangeMemory
from hybridserve.kernels.all_reduce.triton_peers import POLLS

MAX_PROGRAMS = 528
"""Four on each multiprocessor of an H200. Each asks once whether the parts are there."""


@triton.jit(do_not_specialize=["num_rows", "rank", "call", "slot"])
def _sum_parts_kernel(
    x,
    own,
    residual,
    weight,
    total,
    normed,
    num_rows,
    piece_elements,
    rank,
    call,
    slot,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORLD: tl.constexpr,
):
    dtype: tl.constexpr = total.dtype.element_ty
    parts = tl.load(own).to(tl.pointer_type(dtype))
    flags = tl.load(own + 1).to(tl.pointer_type(tl.int32)) + slot * WORLD
    given_up = tl.load(own + 2).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        if peer != rank:
            behind = 1
            while behind > 0:
                polls = 0
                while (behind > 0) & (polls < POLLS):
                    seen = tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys")
                    # not later ones: a slot's next call comes after this one's end
                    behind = (seen != call).to(tl.int32)
                    polls += 1
                if behind > 0:
                    # an atomic operation, of which all threads know the same
                    behind = tl.where(tl.atomic_add(given_up, 0, sem="relaxed", scope="sys") != 0, 0, behind)
    tl.debug_barrier()
    cols = tl.arange(0, BLOCK_D)
    mask = cols < D
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = (tl.full([], 0, tl.int64) + row) * D + cols
        mine = tl.load(x + at, mask, other=0.0).to(tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for peer in tl.static_range(WORLD):
            place = slot * (WORLD - 1) + peer - (peer > rank).to(tl.int32)
            there = mask & (peer != rank)
            # an address out of a table is of no known alignment, without which accesses are of one element
            source = tl.multiple_of(parts + place.to(tl.int64) * piece_elements, 16)
            theirs = tl.load(source + at, there, other=0.0, volatile=True).to(tl.float32)
            acc += tl.where(peer == rank, mine, theirs)
        acc += tl.load(residual + at, mask, other=0.0).to(tl.float32)
        rounded = acc.to(dtype)
        tl.store(total + at, rounded, mask)
        # of the rounded sum, as a norm after an unfused sum would see it
        y = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
        y = y * scale * tl.load(weight + cols, mask, other=0.0).to(tl.float32)
        tl.store(normed + at, y.to(dtype), mask)


def sum_parts(
    memory: ExchangeMemory,
    call: int,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of this rank's part and those that the others copied here in their call of the same number.

    call: the number that their flags bear; of calls in a row no `SLOTS` have the same.
    x: [T, D], this rank's part, contiguous. residual: [T, D], the same on all ranks, is added. weight: [D],
        plain, of the RMSNorm over D.
    Returns (sum [T, D] in x's dtype, its norm): the same bits on all ranks. Cannot be captured: the call's
    number is an argument.
    """
    rows, dim = x.shape
    assert x.is_contiguous() and residual.is_contiguous(), (x.stride(), residual.stride())
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(dim)
    _sum_parts_kernel[(min(rows, MAX_PROGRAMS),)](
        x,
        memory.own,
        residual,
        weight,
        total,
        normed,
        rows,
        memory.piece_bytes // x.element_size(),
        memory.rank,
        call,
        call % SLOTS,
        eps,
        D=dim,
        BLOCK_D=block,
        WORLD=memory.world_size,
        num_warps=min(16, max(4, block // 512)),
    )
    return total, normed
