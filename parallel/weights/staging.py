"""From a file's bytes to a tensor's memory, through a small buffer of one thread.

Owns the buffers and when one may be written again. Knows nothing of checkpoints: it is given file
descriptors, offsets and shapes.
"""

import math
import os
from collections.abc import Iterator

import torch

from hybridserve.parallel.weights.rows import copy_rows

STAGING_BYTES = 8 * 2**20
"""Read at once at most: the size of one buffer, of which a thread has two for a GPU and one for a CPU."""


class Staging:
    """The buffers of one thread for one device; pinned for a GPU, so that copies to it run beside the reads.

    Copies are queued on the thread's current stream, which the caller waits for in the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        count = 2 if self._on_gpu else 1
        self._buffers = [
            torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)
        ]
        self._copied = [torch.cuda.Event() for _ in range(count)] if self._on_gpu else []
        self._turn = 0

    def fill(
        self,
        target: torch.Tensor,
        fd: int,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        dim: int,
        start: int,
        end: int,
    ) -> None:
        """Fill `target` with indices [start, end) of dimension `dim` of a tensor in a file.

        The tensor, of `shape` and `dtype`, lies at byte `offset` of the file `fd`.

        Raises:
            EOFError: the file ends before the tensor does.
        """
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        kept = shape[1:] if dim == 0 else (*shape[1:dim], end - start, *shape[dim + 1 :])
        kept_bytes = math.prod(kept) * dtype.itemsize
        first, last = (start, end) if dim == 0 else (0, shape[0])
        if dim > 1 or kept_bytes > STAGING_BYTES:
            inner = (dim - 1, start, end) if dim else (0, 0, shape[1])
            for row in range(first, last):
                self.fill(target[row - first], fd, offset + row * row_bytes, shape[1:], dtype, *inner)
            return
        skipped = start * (kept_bytes // (end - start)) if dim and end > start else 0
        rows = max(1, STAGING_BYTES // max(1, kept_bytes))
        for low in range(first, last, rows):
            high = min(low + rows, last)
            if kept_bytes == row_bytes:
                _read_ahead(fd, offset, row_bytes, low, min(high + rows, last))
            buffer = self._take((high - low) * kept_bytes)
            memory = memoryview(buffer.numpy())
            for at, length, begin in _runs(low, high, row_bytes, kept_bytes, skipped):
                _read(fd, memory[at : at + length], offset + begin)
            self._send(target[low - first : high - first], buffer.view(dtype).view(high - low, *kept))

    def _take(self, num_bytes: int) -> torch.Tensor:
        """The next buffer, once the copy out of it is done."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._on_gpu:
            self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:num_bytes]

    def _send(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if not self._on_gpu:
            copy_rows(target, values)
            return
        if target.dtype == values.dtype and target.is_contiguous():
            target.copy_(values, non_blocking=True)
        else:
            # converted there: on this side it would be a second, unpinned copy
            target.copy_(values.to(self.device, non_blocking=True))
        self._copied[self._turn].record()


def _runs(
    low: int, high: int, row_bytes: int, kept_bytes: int, skipped: int
) -> Iterator[tuple[int, int, int]]:
    """(place in the buffer, length, place in the tensor) of the bytes kept of rows [low, high)."""
    if kept_bytes == row_bytes:
        yield 0, (high - low) * row_bytes, low * row_bytes
        return
    for row in range(low, high):
        yield (row - low) * kept_bytes, kept_bytes, row * row_bytes + skipped


def _read_ahead(fd: int, offset: int, row_bytes: int, low: int, high: int) -> None:
    """Have the kernel fetch rows [low, high), a piece and the next.

    By itself it looks 128 KiB ahead, which on a cold disk took up to twice as long.
    """
    os.posix_fadvise(fd, offset + low * row_bytes, (high - low) * row_bytes, os.POSIX_FADV_WILLNEED)


def _read(fd: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(fd, [memory], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(memory)} bytes before its tensor does")
        memory, offset = memory[count:], offset + count
