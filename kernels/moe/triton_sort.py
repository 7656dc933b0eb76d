"""Choices sorted by expert on the GPU, into tiles of rows of one expert; no size is known to the host.

Every grid and buffer has the size that the most tiles need, so that a CUDA graph can hold the launches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 256


@dataclass(frozen=True)
class Tiles:
    """Rows of one expert each, at most `block_m` of them a tile. int32 on the device."""

    block_m: int
    max_tiles: int
    num_tiles: torch.Tensor
    """[1]: how many there are; entries past them are undefined."""
    experts: torch.Tensor
    """[max_tiles]"""
    starts: torch.Tensor
    """[max_tiles]: the tile's first row among the sorted ones."""
    rows: torch.Tensor
    """[max_tiles]: how many it has."""
    choices: torch.Tensor
    """[T * S]: which choice (token * S + slot) a sorted row is of; undefined past the last row."""


@triton.jit(do_not_specialize=["num_choices"], do_not_specialize_on_alignment=["ids_ptr"])
def _rank_kernel(ids_ptr, counts_ptr, ranks_ptr, num_choices, BLOCK: tl.constexpr):
    """Counts each expert's choices and numbers them, in any order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, at < num_choices, other=-1)
    ranks = tl.atomic_add(counts_ptr + ids, 1, mask=ids >= 0, sem="relaxed")
    tl.store(ranks_ptr + at, ranks, ids >= 0)


@triton.jit
def _prefix_kernel(
    counts_ptr,
    row_starts_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each expert's first row and first tile."""
    experts = tl.arange(0, BLOCK_E)
    mask = experts < NUM_EXPERTS
    counts = tl.load(counts_ptr + experts, mask, other=0)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    tl.store(row_starts_ptr + experts, tl.cumsum(counts, 0) - counts, mask)
    tl.store(tile_starts_ptr + experts, tl.cumsum(tiles, 0) - tiles, mask)
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["num_choices"], do_not_specialize_on_alignment=["ids_ptr"])
def _scatter_kernel(
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    row_starts_ptr,
    tile_starts_ptr,
    choices_ptr,
    experts_ptr,
    starts_ptr,
    rows_ptr,
    num_choices,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Puts each choice into its place; the first of a tile describes it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, at < num_choices, other=-1)
    mask = ids >= 0
    ranks = tl.load(ranks_ptr + at, mask, other=0)
    row = tl.load(row_starts_ptr + ids, mask, other=0) + ranks
    tl.store(choices_ptr + row, at, mask)
    first = mask & (ranks % BLOCK_M == 0)
    left = tl.load(counts_ptr + ids, first, other=0) - ranks
    tile = tl.load(tile_starts_ptr + ids, first, other=0) + ranks // BLOCK_M
    tl.store(experts_ptr + tile, ids, first)
    tl.store(starts_ptr + tile, row, first)
    tl.store(rows_ptr + tile, tl.minimum(left, BLOCK_M), first)


def sort_by_expert(ids: torch.Tensor, num_experts: int, block_m: int) -> Tiles:
    """ids: int32 [T, S] in [0, num_experts), or -1 for none. Capturable in a CUDA graph."""
    count = ids.numel()
    max_tiles = min(count, count // block_m + num_experts)
    block_e = triton.next_power_of_2(num_experts)
    # one allocation; counts begin at zero
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    sizes = (num_experts, num_experts, count, count, max_tiles, max_tiles, max_tiles, 1)
    # each part begins on 16 bytes, whatever the sizes: kernels are compiled anew for other alignments
    rounded = [triton.cdiv(size, 4) * 4 for size in sizes]
    memory = torch.empty(sum(rounded), dtype=torch.int32, device=ids.device).split(rounded)
    parts = (part[:size] for part, size in zip(memory, sizes, strict=True))
    row_starts, tile_starts, ranks, choices, experts, starts, rows, num_tiles = parts
    grid = (triton.cdiv(count, BLOCK),)
    _rank_kernel[grid](ids, counts, ranks, count, BLOCK=BLOCK, num_warps=4)
    _prefix_kernel[(1,)](
        counts,
        row_starts,
        tile_starts,
        num_tiles,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        BLOCK_M=block_m,
        num_warps=4,
    )
    _scatter_kernel[grid](
        ids,
        ranks,
        counts,
        row_starts,
        tile_starts,
        choices,
        experts,
        starts,
        rows,
        count,
        BLOCK_M=block_m,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return Tiles(block_m, max_tiles, num_tiles, experts, starts, rows, choices)
