"""Freed memory stays with the process that asked for it, and only with that one (glibc)."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from hybridserve.replicas.engine.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 20 << 20
blocks = [libc.malloc(size) for _ in range(5)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks:
    libc.free(block)
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


@pytest.mark.parametrize(("mode", "stays"), [("keep", True), ("leave", False)])
def test_freed_memory_stays_only_where_it_was_asked_for(mode, stays):
    run = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    assert (int(run.stdout) > 100 << 20) == stays
