"""Experts of many tokens on the GPU: two products grouped by expert, and a sum over each token's choices.

A program computes one tile of rows of one expert (see `triton_sort`). Rows of a product do not depend on one
another and the sum has a fixed order, so a token's bits do not depend on where its rows were sorted to.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridserve.kernels.hopper import has_tensor_descriptors
from hybridserve.kernels.moe.triton_sort import sort_by_expert

# fp32 is added in chains of so many products: one chain of 2,048 errs 4 times as much
CHAIN = tl.constexpr(64)


@triton.jit
def _gate_up_chain(
    x_at,
    w_at,
    gate,
    up,
    begin,
    end,
    channels,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the products of columns [begin, end) to gate and up."""
    inner = tl.arange(0, BLOCK_K)
    for k in range(begin, end, BLOCK_K):
        if H % BLOCK_K == 0 and I % BLOCK_N == 0:
            x = tl.load(x_at + k)
            w_gate = tl.load(w_at + k)
            w_up = tl.load(w_at + I * H + k)
        else:
            inside = inner < H - k
            w_mask = inside[:, None] & (channels < I)[None, :]
            x = tl.load(x_at + k, inside[None, :], other=0.0)
            w_gate = tl.load(w_at + k, w_mask, other=0.0)
            w_up = tl.load(w_at + I * H + k, w_mask, other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
        up = tl.dot(x, w_up, up, input_precision=PRECISION)
    return gate, up


@triton.jit
def _down_chain(
    act_at,
    w_at,
    y,
    begin,
    end,
    channels,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the products of columns [begin, end) to y."""
    inner = tl.arange(0, BLOCK_K)
    for k in range(begin, end, BLOCK_K):
        if I % BLOCK_K == 0 and H % BLOCK_N == 0:
            act = tl.load(act_at + k)
            w = tl.load(w_at + k)
        else:
            inside = inner < I - k
            act = tl.load(act_at + k, inside[None, :], other=0.0)
            w = tl.load(w_at + k, inside[:, None] & (channels < H)[None, :], other=0.0)
        y = tl.dot(act, w, y, input_precision=PRECISION)
    return y


@triton.jit
def _gate_up_tile(
    x_ptr,
    w13,
    act_ptr,
    choices_ptr,
    expert,
    start,
    rows,
    first,
    x_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """silu(gate) * up of channels [first, first + BLOCK_N) of one tile's rows."""
    row = tl.arange(0, BLOCK_M)
    mask = row < rows
    # rows past the tile's compute the first again, and are not stored
    choices = tl.load(choices_ptr + start + tl.where(mask, row, 0))
    channels = first + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (choices // SLOTS).to(tl.int64)[:, None] * x_stride + inner[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if TMA:
        gate_row = expert * (2 * I) + first
        for k in range(0, H, BLOCK_K):
            x = tl.load(x_at + k)
            gate = tl.dot(x, w13.load([gate_row, k]).T, gate, input_precision=PRECISION)
            up = tl.dot(x, w13.load([gate_row + I, k]).T, up, input_precision=PRECISION)
    else:
        w_at = w13 + expert.to(tl.int64) * (2 * I * H) + channels[None, :] * H + inner[:, None]
        if PRECISION == "ieee":
            for begin in range(0, H, CHAIN):
                end = tl.minimum(begin + CHAIN, H)
                more_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                more_up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                more_gate, more_up = _gate_up_chain(
                    x_at, w_at, more_gate, more_up, begin, end, channels, H, I, BLOCK_N, BLOCK_K, PRECISION
                )
                gate += more_gate
                up += more_up
        else:
            gate, up = _gate_up_chain(x_at, w_at, gate, up, 0, H, channels, H, I, BLOCK_N, BLOCK_K, PRECISION)
    act = gate / (1 + tl.exp(-gate)) * up
    out = act_ptr + (start + row).to(tl.int64)[:, None] * I + channels[None, :]
    tl.store(out, act.to(act_ptr.dtype.element_ty), mask[:, None] & (channels < I)[None, :])


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w13,
    act_ptr,
    num_tiles_ptr,
    experts_ptr,
    starts_ptr,
    rows_ptr,
    choices_ptr,
    x_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """act of the sorted rows, [T * S, I]. With HALVES a tile of at most half its rows computes half of it."""
    blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    if tile < tl.load(num_tiles_ptr):
        expert = tl.load(experts_ptr + tile)
        start = tl.load(starts_ptr + tile)
        rows = tl.load(rows_ptr + tile)
        first = (tl.program_id(0) % blocks) * BLOCK_N
        if HALVES and rows <= BLOCK_M // 2:
            _gate_up_tile(
                x_ptr,
                w13,
                act_ptr,
                choices_ptr,
                expert,
                start,
                rows,
                first,
                x_stride,
                H,
                I,
                SLOTS,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
                TMA,
                PRECISION,
            )
        else:
            _gate_up_tile(
                x_ptr,
                w13,
                act_ptr,
                choices_ptr,
                expert,
                start,
                rows,
                first,
                x_stride,
                H,
                I,
                SLOTS,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                TMA,
                PRECISION,
            )


@triton.jit
def _down_tile(
    act_ptr,
    w2,
    y_ptr,
    choices_ptr,
    expert,
    start,
    rows,
    first,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """w2 act, channels [first, first + BLOCK_N) of one tile's rows."""
    row = tl.arange(0, BLOCK_M)
    mask = row < rows
    channels = first + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    act_at = act_ptr + (start + tl.where(mask, row, 0)).to(tl.int64)[:, None] * I + inner[None, :]
    y = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if TMA:
        for k in range(0, I, BLOCK_K):
            act = tl.load(act_at + k)
            y = tl.dot(act, w2.load([expert * H + first, k]).T, y, input_precision=PRECISION)
    else:
        w_at = w2 + expert.to(tl.int64) * (H * I) + channels[None, :] * I + inner[:, None]
        if PRECISION == "ieee":
            for begin in range(0, I, CHAIN):
                end = tl.minimum(begin + CHAIN, I)
                more = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                y += _down_chain(act_at, w_at, more, begin, end, channels, H, I, BLOCK_N, BLOCK_K, PRECISION)
        else:
            y = _down_chain(act_at, w_at, y, 0, I, channels, H, I, BLOCK_N, BLOCK_K, PRECISION)
    choices = tl.load(choices_ptr + start + row, mask, other=0).to(tl.int64)
    out = y_ptr + choices[:, None] * H + channels[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask[:, None] & (channels < H)[None, :])


@triton.jit
def _down_kernel(
    act_ptr,
    w2,
    y_ptr,
    num_tiles_ptr,
    experts_ptr,
    starts_ptr,
    rows_ptr,
    choices_ptr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y of the choices in their own order, [T * S, H]; HALVES as above."""
    blocks: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    if tile < tl.load(num_tiles_ptr):
        expert = tl.load(experts_ptr + tile)
        start = tl.load(starts_ptr + tile)
        rows = tl.load(rows_ptr + tile)
        first = (tl.program_id(0) % blocks) * BLOCK_N
        if HALVES and rows <= BLOCK_M // 2:
            _down_tile(
                act_ptr,
                w2,
                y_ptr,
                choices_ptr,
                expert,
                start,
                rows,
                first,
                H,
                I,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
                TMA,
                PRECISION,
            )
        else:
            _down_tile(
                act_ptr,
                w2,
                y_ptr,
                choices_ptr,
                expert,
                start,
                rows,
                first,
                H,
                I,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                TMA,
                PRECISION,
            )


@triton.jit
def _combine_kernel(
    y_ptr,
    weights_ptr,
    ids_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """residual + the weighted sum of a token's choices, slot by slot."""
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    if HAS_RESIDUAL:
        acc = tl.load(residual_ptr + token * residual_stride + cols, cols < H, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        choice = token * SLOTS + slot
        chosen = tl.load(ids_ptr + choice) >= 0
        y = tl.load(y_ptr + choice * H + cols, (cols < H) & chosen, other=0.0).to(tl.float32)
        acc += y * tl.load(weights_ptr + choice)
    tl.store(out_ptr + token * H + cols, acc.to(out_ptr.dtype.element_ty), cols < H)


@dataclass(frozen=True)
class Config:
    """Tile sizes of 16-bit operands; inner blocks are halved for fp32."""

    block_m: int
    up: tuple[int, int, int, int]
    """BLOCK_N (of gate and of up), BLOCK_K, warps, stages."""
    down: tuple[int, int, int, int]
    halves: bool = False
    """Whether a tile of at most half its rows is computed as half a tile."""
    tma: bool = False
    """Whether weights are fetched by tensor descriptors, where sizes are multiples of the blocks."""


# up to 24 choices an expert on average, up to 56, more
STREAM = Config(32, up=(64, 128, 4, 3), down=(128, 128, 4, 3), halves=True)
MIDDLE = Config(64, up=(64, 64, 4, 4), down=(128, 64, 4, 4), halves=True, tma=True)
DENSE = Config(128, up=(128, 64, 8, 4), down=(256, 64, 8, 3), halves=True, tma=True)
# fp32, whose products are no tensor core's
EXACT = Config(16, up=(32, 64, 4, 2), down=(64, 64, 4, 2))
COMBINE_BLOCK = 1024


def choose_config(choices: int, num_experts: int, dtype: torch.dtype) -> Config:
    """Tiles of about an expert's rows: larger ones compute rows that are not there, smaller ones read weights
    again."""
    if dtype == torch.float32:
        return EXACT
    average = choices / num_experts
    return STREAM if average <= 24 else MIDDLE if average <= 56 else DENSE


def moe_experts_grouped(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    residual: torch.Tensor | None,
    config: Config | None = None,
) -> torch.Tensor:
    """As `dispatch.moe_experts`, for any number of tokens."""
    tokens, hidden = x.shape
    (experts, _, size), slots = w2.shape, ids.shape[1]
    config = config or choose_config(ids.numel(), experts, x.dtype)
    tiles = sort_by_expert(ids, experts, config.block_m)
    described = (tiles.num_tiles, tiles.experts, tiles.starts, tiles.rows, tiles.choices)
    act = torch.empty(tokens * slots, size, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens * slots, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    may_tma = config.tma and has_tensor_descriptors(x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    block_n, block_k, num_warps, num_stages = config.up
    block_k = block_k * 2 // x.dtype.itemsize
    tma = may_tma and hidden % block_k == 0 and size % block_n == 0
    _gate_up_kernel[(tiles.max_tiles * triton.cdiv(size, block_n),)](
        x,
        TensorDescriptor.from_tensor(w13.flatten(0, 1), [block_n, block_k]) if tma else w13,
        act,
        *described,
        x.stride(0),
        H=hidden,
        I=size,
        SLOTS=slots,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HALVES=config.halves,
        TMA=tma,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    block_n, block_k, num_warps, num_stages = config.down
    block_k = block_k * 2 // x.dtype.itemsize
    tma = may_tma and size % block_k == 0 and hidden % block_n == 0
    _down_kernel[(tiles.max_tiles * triton.cdiv(hidden, block_n),)](
        act,
        TensorDescriptor.from_tensor(w2.flatten(0, 1), [block_n, block_k]) if tma else w2,
        y,
        *described,
        H=hidden,
        I=size,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HALVES=config.halves,
        TMA=tma,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    own = x if residual is None else residual
    block_h = min(COMBINE_BLOCK, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens * triton.cdiv(hidden, block_h),)](
        y,
        weights,
        ids,
        own,
        out,
        own.stride(0),
        H=hidden,
        SLOTS=slots,
        BLOCK_H=block_h,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out
