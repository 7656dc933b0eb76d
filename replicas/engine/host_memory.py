"""How this process' C library treats freed memory. Knows nothing of what is stored in it."""

import ctypes
import platform

# names and the largest threshold are of glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory for the next allocations; without glibc, do nothing.

    By default it gives the temporaries of a step back to the kernel, which hands them out again page by page,
    zeroed: that took a tenth of a prefill's time.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
