"""Sizes and bandwidths of collectives, with the definitions of nccl-tests. Torch-free.

nccl-tests (doc/PERFORMANCE.md) calls the size S of a message: of an all-reduce the buffer; of an all-gather
the joined result; of a reduce-scatter the whole input. algbw = S / t, and busbw = algbw * factor(n), where
factor(n) * S is what each rank must send at least, so that busbw compares with a link's speed at every n.
"""

import math
from collections.abc import Sequence

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SMALLEST_BYTES = 1024
LARGEST_BYTES = 256 * 2**20


def wire_factor(collective: str, ranks: int) -> float:
    """Bytes each rank sends per byte of message: 2(n-1)/n for an all-reduce, (n-1)/n for the others.

    Raises:
        ValueError: the collective is unknown, or there is no rank.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def algbw(num_bytes: int, seconds: float) -> float:
    """Bytes of message per second."""
    return num_bytes / seconds


def busbw(collective: str, num_bytes: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank's links carried at least."""
    return algbw(num_bytes, seconds) * wire_factor(collective, ranks)


def sweep_sizes(max_bytes: int = LARGEST_BYTES, step: int = 2) -> tuple[int, ...]:
    """1 KiB, then times `step` (a power of two), up to `max_bytes`, at most 256 MiB.

    Raises:
        ValueError: `max_bytes` is less than 1 KiB.
    """
    if max_bytes < SMALLEST_BYTES:
        raise ValueError(f"max_size must be at least {SMALLEST_BYTES} bytes, got {max_bytes}")
    sizes = []
    size = SMALLEST_BYTES
    while size <= min(max_bytes, LARGEST_BYTES):
        sizes.append(size)
        size *= step
    return tuple(sizes)


def rank_counts(tp_size: int) -> tuple[int, ...]:
    """1, 2, 4 … below `tp_size`, then `tp_size`: where the strategies are measured."""
    powers = [2**i for i in range(tp_size.bit_length()) if 2**i < tp_size]
    return (*powers, tp_size)


def percentile(times: Sequence[float], percent: float) -> float:
    """The smallest of `times` that `percent` per cent of them do not exceed (nearest rank)."""
    ordered = sorted(times)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
