"""A process that looks for garbage rarely still frees what nobody holds, cycles too when it is asked."""

import gc
import subprocess
import sys

import pytest

from hybridserve.cluster.garbage import collecting_nothing

PROGRAM = """
import gc, weakref
from hybridserve.cluster.garbage import collect_rarely

class Node: pass

collect_rarely()
before = gc.get_stats()[0]["collections"]
kept = [[i] for i in range(20_000)]
assert gc.get_stats()[0]["collections"] == before, gc.get_stats()
node = Node(); node.self = node; seen = weakref.ref(node); del node
many = [[i] for i in range(60_000)]
assert gc.get_stats()[0]["collections"] > before
assert seen() is None
print("ok")
"""


def test_a_frame_sets_nothing_off_and_cycles_still_go() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr
    assert gc.get_threshold()[0] == 700


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_importing_and_then_as_before(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), collecting_nothing():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if was else gc.disable)()
