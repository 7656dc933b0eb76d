"""Which form computes a product of T tokens on a GPU, by figures of one H200 (docs/log.md).

A choice depends on T and on the weight's shape, never on values, so it is fixed for a captured bucket.
"""

import torch

from hybridserve.kernels.linear.triton_skinny import MAX_TOKENS, SkinnyTile

MIN_WEIGHT_SIZE = 1 << 22
"""Elements; products with smaller weights were not measured."""
SLOTS = 264
"""Programs of `SkinnyTile` that run at once: two on each of 132 multiprocessors."""


def takes_triton(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether our kernels are the faster ones for x [T, K] and weight [N, K]."""
    return (
        x.is_cuda
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.stride(1) == weight.stride(1) == 1
        and weight.shape[1] % 128 == 0
        and weight.numel() >= MIN_WEIGHT_SIZE
    )


def skinny_tile(rows: int, columns: int) -> SkinnyTile:
    """For a weight [rows, columns]: up to 4 parts of 2,048 columns at least, as long as all run at once."""
    parts = 1
    while parts < 4 and -(-rows // 64) * parts * 2 <= SLOTS and columns >= 2048 * parts * 2:
        parts *= 2
    return SkinnyTile(parts=parts)


def gated_tile(rows: int) -> SkinnyTile:
    """For `rows` rows of gate and as many of up; three stages let a third program run on a multiprocessor."""
    return SkinnyTile(columns=64, stages=4 if rows <= 64 * SLOTS else 3)
