"""The causal convolution of ragged sequences on the GPU, in one launch with bias, silu and the rings.

A program takes one chunk of tokens and a block of channels; what lies before a sequence's first chunk comes
from its ring. That chunk's program is also the ring's only writer, from the sequence's last inputs, so that
no program reads what another writes. Knows nothing of what the channels mean.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from hybridserve.kernels.varlen import varlen_tables

# the linear attention's chunk, so that a step has one table for both
CHUNK = 64
MAX_BLOCK_C = 512
NUM_WARPS = 4
# rows of a chunk that are loaded before the first of them is used
GROUP = 8


# tables of a step, which may start at any element of a larger one
TABLES = [
    "cu_seqlens_ptr",
    "chunk_seqs_ptr",
    "chunk_ids_ptr",
    "context_ptr",
    "state_indices_ptr",
    "has_initial_ptr",
]


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=TABLES)
def _conv_prefill_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ring_ptr,
    out_ptr,
    cu_seqlens_ptr,
    chunk_seqs_ptr,
    chunk_ids_ptr,
    context_ptr,
    state_indices_ptr,
    has_initial_ptr,
    num_tokens,
    x_stride,
    weight_stride_c,
    weight_stride_k,
    ring_stride_n,
    ring_stride_k,
    C: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    KERNEL: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    chunk = tl.program_id(0) // blocks
    first_channel = (tl.program_id(0) % blocks) * BLOCK_C
    channels = first_channel + tl.arange(0, BLOCK_C)
    known = channels < C
    seq = tl.load(chunk_seqs_ptr + chunk)
    chunk_start = tl.load(chunk_ids_ptr + chunk) * CHUNK
    seq_start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + seq + 1) - seq_start
    unit = tl.load(state_indices_ptr + seq)
    context = tl.load(context_ptr + seq)
    old = (tl.load(has_initial_ptr + seq) != 0) & (unit >= 0)
    ring = ring_ptr + unit * ring_stride_n + channels
    x = x_ptr + (seq_start + chunk_start) * x_stride + channels

    # what lies before the chunk, oldest first; the ring is zero before position 0
    window = ()
    taps = ()
    for i in tl.static_range(KERNEL - 1):
        row = tl.zeros([BLOCK_C], dtype=tl.float32)
        if chunk_start > 0:
            row = tl.load(x + (i - (KERNEL - 1)) * x_stride, known, other=0.0).to(tl.float32)
        elif old:
            column = (context + i + 1) % KERNEL
            row = tl.load(ring + column * ring_stride_k, known, other=0.0).to(tl.float32)
        window = window + (row,)
    for i in tl.static_range(KERNEL):
        tap = tl.load(weight_ptr + channels * weight_stride_c + i * weight_stride_k, known, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channels, known, other=0.0).to(tl.float32)

    # each of up to three parts of the channels is its own dense [T, size], laid end to end
    part_start = 0
    part_size = FIRST_END
    if first_channel >= FIRST_END:
        part_start = FIRST_END
        part_size = SECOND_END - FIRST_END
    if first_channel >= SECOND_END:
        part_start = SECOND_END
        part_size = C - SECOND_END
    out = out_ptr + num_tokens.to(tl.int64) * part_start + (channels - part_start)
    out += (seq_start + chunk_start) * part_size

    count = tl.minimum(length - chunk_start, CHUNK).to(tl.int32)
    for t in range(0, count, GROUP):
        rows = window
        for i in tl.static_range(GROUP):
            # past the end the last row stands in, so that no load waits for a branch
            at = tl.minimum(t + i, count - 1)
            rows = rows + (tl.load(x + at * x_stride, known, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            acc = rows[i + KERNEL - 1] * taps[KERNEL - 1]
            for lag in tl.static_range(1, KERNEL):
                acc += rows[i + KERNEL - 1 - lag] * taps[KERNEL - 1 - lag]
            if HAS_BIAS:
                acc += bias
            y = (acc / (1 + tl.exp(-acc))).to(out_ptr.dtype.element_ty)
            real = channels < tl.where(t + i < count, C, 0)
            tl.store(out + (t + i) * part_size, y, real)
        window = rows[GROUP:]

    if (chunk_start == 0) & (unit >= 0):
        # other threads of this program may still be reading the old ring
        tl.debug_barrier()
        for lag in tl.static_range(KERNEL):
            column = (context + length + KERNEL - 1 - lag) % KERNEL
            if lag < length:
                last = tl.load(x + (length - 1 - lag) * x_stride, known, other=0.0)
                tl.store(ring + column * ring_stride_k, last.to(ring_ptr.dtype.element_ty), known)
            elif old == 0:
                # before position 0; where there is context, the old column is right already
                zero = tl.zeros([BLOCK_C], dtype=ring_ptr.dtype.element_ty)
                tl.store(ring + column * ring_stride_k, zero, known)


@lru_cache(maxsize=32)
def _context_table(context_lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [S]; cached by value, so that the layers of one step share one copy."""
    table = torch.tensor(context_lens, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
) -> torch.Tensor:
    """S sequences laid end to end, each going on from its ring.

    x: [T, C], T = sum(query_lens), the last axis dense. bias: [C] or None.
    weight: [C, kernel], its last column meets the current token; fastest where its columns are dense.
    conv_state: [N, kernel, C], the last axis dense; rows `state_indices` (int64 [S], distinct) are updated in
        place and wholly defined afterwards; rows may overlap in memory as long as the named ones do not. A
        negative index stands for zeros before the sequence and no ring.
    has_initial_state: bool [S]; where False the history is zero and the ring's old bytes are not read.
    query_lens, context_lens: tokens of each sequence now and before. One without tokens keeps its ring.
    Returns silu(conv(x) + bias), [T, C] in the dtype of x; the bits do not depend on where a sequence is cut.
    """
    (out,) = _launch(
        x,
        weight,
        bias,
        conv_state,
        state_indices,
        has_initial_state,
        query_lens,
        context_lens,
        (x.shape[1],),
    )
    return out


def causal_conv1d_prefill_split(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    sizes: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`causal_conv1d_prefill` whose result comes as three dense tensors [T, size] of neighbouring channels.

    sizes: channels of q, k and v, sum C.
    """
    first, second, third = _launch(
        x, weight, bias, conv_state, state_indices, has_initial_state, query_lens, context_lens, sizes
    )
    return first, second, third


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    sizes: Sequence[int],
) -> list[torch.Tensor]:
    tokens, channels = x.shape
    kernel = weight.shape[1]
    assert sum(query_lens) == tokens and len(query_lens) == len(context_lens) == state_indices.shape[0]
    assert sum(sizes) == channels == weight.shape[0] and x.stride(1) == conv_state.stride(2) == 1
    assert conv_state.shape[1:] == (kernel, channels) and has_initial_state.shape == state_indices.shape
    out = torch.empty(tokens * channels, dtype=x.dtype, device=x.device)
    ends = [*(sum(sizes[: i + 1]) for i in range(len(sizes))), channels, channels]
    # a block of channels lies in one part
    block = min(MAX_BLOCK_C, triton.next_power_of_2(channels))
    if len(sizes) > 1:
        block = min(block, gcd(*sizes) & -gcd(*sizes))
    tables = varlen_tables(query_lens, CHUNK, x.device)
    if tokens:
        _conv_prefill_kernel[(tables.chunk_seqs.shape[0] * triton.cdiv(channels, block),)](
            x,
            weight,
            x if bias is None else bias,
            conv_state,
            out,
            tables.cu_seqlens,
            tables.chunk_seqs,
            tables.chunk_ids,
            _context_table(context_lens, x.device),
            state_indices,
            has_initial_state,
            tokens,
            x.stride(0),
            *weight.stride(),
            *conv_state.stride()[:2],
            C=channels,
            FIRST_END=ends[0],
            SECOND_END=ends[1],
            KERNEL=kernel,
            CHUNK=CHUNK,
            GROUP=GROUP,
            BLOCK_C=block,
            HAS_BIAS=bias is not None,
            num_warps=NUM_WARPS,
        )
    parts = out.split([tokens * size for size in sizes])
    return [part.view(tokens, size) for part, size in zip(parts, sizes, strict=True)]
