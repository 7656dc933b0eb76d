"""Denormal numbers flushed to zero while a step runs on a CPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormals in this thread, and leave the thread as it was found.

    Recurrent states decay into denormals, and multiplying those took a CPU twenty times as long. The mode is
    the thread's and not ours to keep: the caller of the offline API may count on IEEE arithmetic.
    """
    smallest = sys.float_info.min
    already = smallest / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)
