"""A step's host arrays on the device, in one transfer. Knows nothing of what they mean."""

from collections.abc import Sequence

import numpy as np
import torch

ALIGN = 256
"""Bytes between the starts of two arrays: kernels compile anew for another alignment."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array as a tensor of its shape and dtype on `device`; on a GPU without waiting for it.

    On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGN) * ALIGN
    # pinned blocks come from torch's cache, which does not hand one out again before its transfer has ended
    staged = torch.empty(max(size, ALIGN), dtype=torch.uint8, pin_memory=True)
    host = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = staged.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
