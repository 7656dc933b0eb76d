"""One layer's launches again for another: what is exchanged, and what stays; without a kernel or a GPU."""

import threading

import pytest
import torch
import triton.language as tl
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridserve.kernels import launch_tape
from hybridserve.kernels.launch_tape import LaunchTape


def _scale(x, weight, cache, out, size, ratio, table, BLOCK: tl.constexpr, KEEP: tl.constexpr = True):
    pass


kernel = jit.JITFunction(_scale)


class Compiled:
    """What Triton gives for a kernel; notes how it is launched."""

    function = "function"
    packed_metadata = "metadata"

    def __init__(self) -> None:
        self.launches = []

    def run(self, *args):
        self.launches.append(args)


@pytest.fixture
def compiled(monkeypatch) -> Compiled:
    one = Compiled()
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, grid, warmup, **options: one)

    class Active:
        @staticmethod
        def get_current_device():
            return 3

        @staticmethod
        def get_current_stream(device):
            return f"stream of {device}"

    monkeypatch.setattr(launch_tape.driver, "_active", Active)
    return one


def test_addresses_of_the_layer_are_exchanged_and_nothing_else(compiled):
    x, out, table = torch.zeros(8), torch.zeros(8), torch.zeros(4)
    first, second, third = ((torch.zeros(4), torch.zeros(16)) for _ in range(3))
    original = jit.JITFunction.run
    tape = LaunchTape([one.data_ptr() for one in first])
    with tape.recording():
        kernel[(5,)](x, first[0], first[1], out, 8, 0.5, None, BLOCK=64, num_warps=4)
        kernel[(7, 2)](
            out, cache=first[1][:8], weight=first[0], out=x, size=9, ratio=1.0, table=table, BLOCK=32
        )
    assert jit.JITFunction.run is original
    assert compiled.launches == []
    head = ("stream of 3", "function", "metadata", None, None, None)
    for own in (second, third):
        tape.play([one.data_ptr() for one in own])
        weight, cache = (one.data_ptr() for one in own)
        assert compiled.launches == [
            (5, 1, 1, *head, x.data_ptr(), weight, cache, out.data_ptr(), 8, 0.5, None, 64, True),
            (7, 2, 1, *head, out.data_ptr(), weight, cache, x.data_ptr(), 9, 1.0, table.data_ptr(), 32, True),
        ]
        compiled.launches.clear()


def test_what_the_launches_work_on_lives_as_long_as_the_tape(compiled):
    import weakref

    weight, temporary = torch.zeros(4), torch.zeros(8)
    seen = weakref.ref(temporary)
    tape = LaunchTape([weight.data_ptr()])
    with tape.recording():
        kernel[(1,)](temporary, weight, weight, temporary, 8, 0.5, None, BLOCK=64)
    del temporary
    assert seen() is not None
    del tape
    assert seen() is None


def test_an_error_ends_the_recording(compiled):
    original, tape = jit.JITFunction.run, LaunchTape([0])
    with pytest.raises(RuntimeError, match="no"), tape.recording():
        raise RuntimeError("no")
    assert jit.JITFunction.run is original


def test_a_descriptor_of_the_layers_own_memory_is_refused(compiled):
    """Its address is inside, where none would be exchanged."""
    weight = torch.zeros(64, 64)
    described = TensorDescriptor(weight, [64, 64], [64, 1], [16, 16])
    tape = LaunchTape([weight.data_ptr()])
    with tape.recording(), pytest.raises(AssertionError, match="descriptor"):
        kernel[(1,)](described, weight, weight, weight, 8, 0.5, None, BLOCK=64)


def test_what_another_thread_launches_is_not_noted(compiled):
    weight, x = torch.zeros(4), torch.zeros(8)
    tape = LaunchTape([weight.data_ptr()])

    def launch():
        kernel[(9,)](x, weight, weight, x, 8, 0.5, None, BLOCK=64)

    with tape.recording():
        other = threading.Thread(target=launch)
        other.start()
        other.join()
        kernel[(1,)](x, weight, weight, x, 8, 0.5, None, BLOCK=64)
    tape.play([weight.data_ptr()])
    assert [args[0] for args in compiled.launches] == [1]
