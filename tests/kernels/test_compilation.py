"""Launches that are noted instead of done: what is noted, once, and that no memory is held."""

import gc
import threading
import weakref

import pytest
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from hybridserve.kernels.compilation import Compilation, Pointer, recorded_launches


def _add(x, y, out, size, stride, scale, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at) * scale)


# as @triton.jit makes it where kernels are not interpreted
kernel = JITFunction(_add, do_not_specialize=["size"])


def launch(size=16, stride=16, scale=1.0, block=32, keep=True, warps=4, offset=0, dtype=torch.float32):
    x, y, out = (torch.zeros(64, dtype=dtype)[offset:] for _ in range(3))
    kernel[(1,)](x, y, out, size, stride, scale, BLOCK=block, KEEP=keep, num_warps=warps)
    return x


def test_a_launch_is_noted_and_not_done():
    x, y, out = torch.ones(32), torch.ones(32), torch.zeros(32)
    with recorded_launches() as noted:
        kernel[(1,)](x, y, out=out, size=32, stride=1, scale=2.0, BLOCK=32, KEEP=False)
    assert not out.any()
    (found,) = noted
    assert found.kernel is kernel
    assert [type(a) for a in found.args] == [Pointer, Pointer] and type(found.options["out"]) is Pointer
    assert found.args[0].data_ptr() == x.data_ptr() and found.args[0].dtype == x.dtype


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 1),
        ({"size": 17}, 1),
        ({"scale": 3.0}, 1),
        ({"stride": 32}, 1),
        ({"stride": 1}, 2),
        ({"stride": 24}, 2),
        ({"stride": 1 << 40}, 2),
        ({"block": 64}, 2),
        ({"keep": False}, 2),
        ({"warps": 8}, 2),
        ({"offset": 1}, 2),
        ({"offset": 4}, 1),
        ({"dtype": torch.bfloat16}, 2),
    ],
)
def test_launches_that_take_one_compiled_kernel_are_noted_once(other, count):
    with recorded_launches() as noted:
        for _ in range(3):
            launch()
            launch(**other)
    assert len(noted) == count


def test_no_tensor_is_held():
    with recorded_launches() as noted:
        gone = weakref.ref(launch())
        gc.collect()
        assert gone() is None
    assert len(noted) == 1


def test_launches_are_done_again_afterwards():
    run = JITFunction.run
    with pytest.raises(RuntimeError, match="stop"), recorded_launches():
        assert JITFunction.run is not run
        raise RuntimeError("stop")
    assert JITFunction.run is run


def test_threads_compile_for_the_device_of_who_started_them(monkeypatch):
    """A thread's own device is the first one, and Triton keeps what it compiled by device."""
    here = threading.local()
    here.device, seen = 3, []

    class Noted:
        def compile(self):
            seen.append(here.device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(here, "device", device))
    Compilation([Noted(), Noted()], 2).wait()
    assert seen == [3, 3]
