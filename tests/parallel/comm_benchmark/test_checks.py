"""Wrong collectives are found before they are timed; right ones are counted."""

from dataclasses import replace

import pytest
import torch

from hybridserve.parallel.comm_benchmark import implementations as registry
from hybridserve.parallel.comm_benchmark.checks import check_result, drawn
from hybridserve.parallel.comm_benchmark.counting import CountedCall, counted
from hybridserve.parallel.comm_benchmark.implementations import Implementation, implementations, missing
from hybridserve.parallel.group import SINGLE, TensorParallelGroup

CPU = torch.device("cpu")


class Work:
    def wait(self) -> None: ...


class KnownRanks:
    """A backend of rank 0 of two, which knows what rank 1's input is: the one that `drawn` gives."""

    def __init__(self, spoil: float = 0.0, other_bits: bool = False) -> None:
        self.spoil, self.other_bits = spoil, other_bits

    def allreduce(self, tensors, *options) -> Work:
        (x,) = tensors
        x += drawn(x.numel(), 1, x.dtype, CPU, 5)
        x[-1] += self.spoil
        return Work()

    def allgather(self, outputs, inputs, *options) -> Work:
        for output in outputs[0]:
            output.copy_(inputs[0])
        outputs[0][1] += self.other_bits
        return Work()

    def _allgather_base(self, output, x, *options) -> Work:
        output.copy_(torch.cat([x, drawn(x.numel(), 1, x.dtype, CPU, 5)]))
        output[-1] += self.spoil
        return Work()

    def _reduce_scatter_base(self, output, x, *options) -> Work:
        total = x + drawn(x.numel(), 1, x.dtype, CPU, 5)
        output.copy_(total[: output.numel()])
        output[0] += self.spoil
        return Work()


def checked(name: str, backend: KnownRanks, dtype: torch.dtype = torch.float32) -> float:
    group = TensorParallelGroup(0, 2, backend)
    (implementation,) = (i for i in implementations(name) if i.name == "gloo")
    x = torch.empty(64, dtype=dtype)
    return check_result(implementation, group, x, implementation.prepare(group, x), seed=5)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_right_result_passes_and_a_wrong_one_does_not(collective) -> None:
    assert checked(collective, KnownRanks()) == 0.0
    with pytest.raises(ArithmeticError, match=f"{collective} by gloo of 64"):
        checked(collective, KnownRanks(spoil=0.01))
    with pytest.raises(ArithmeticError, match="rank 0"):
        checked(collective, KnownRanks(spoil=float("nan")))


def test_bf16_is_held_to_its_own_rounding() -> None:
    assert 0.0 < checked("all_reduce", KnownRanks(), torch.bfloat16) < 0.01
    with pytest.raises(ArithmeticError):
        checked("all_reduce", KnownRanks(spoil=0.1), torch.bfloat16)


def test_ranks_must_have_the_same_bits() -> None:
    with pytest.raises(ArithmeticError, match=r"ranks \[1\] have other bits than rank 0"):
        checked("all_reduce", KnownRanks(other_bits=True))


def test_calls_are_counted_by_the_definitions_of_nccl_tests() -> None:
    group, counter = counted(TensorParallelGroup(0, 2, KnownRanks()))
    counter.label = "here"
    group.all_reduce(torch.zeros(8))
    group.all_gather(torch.zeros(3))
    group.backend._allgather_base(torch.empty(8), torch.zeros(4)).wait()
    group.backend._reduce_scatter_base(torch.empty(4), torch.zeros(8)).wait()
    assert counter.calls == [
        CountedCall("all_reduce", 32, "here"),
        CountedCall("all_gather", 24, "here"),
        CountedCall("all_gather", 32, "here"),
        CountedCall("reduce_scatter", 32, "here"),
    ]
    assert [call.wire_bytes(4) for call in counter.calls] == [48.0, 18.0, 24.0, 24.0]
    with pytest.raises(AttributeError):
        group.backend.broadcast([torch.zeros(1)])
    assert counted(SINGLE)[0] is SINGLE


def test_what_does_not_exist_is_listed_until_it_is_registered(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    assert set(missing()) == {f"all_reduce/{name}" for name in ("one_shot", "two_shot", "one_shot_rms_norm")}
    gloo = implementations("all_reduce")[0]
    new = Implementation("one_shot", "all_reduce", gloo.prepare, lambda group, backend, size: None)
    registry.register(new)
    assert "all_reduce/one_shot" not in missing() and new in implementations("all_reduce")
    with pytest.raises(ValueError, match="all_reduce has an implementation named 'one_shot' already"):
        registry.register(replace(new))
