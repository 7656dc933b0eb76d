"""Wrong collectives are found before they are timed; right ones are counted."""

from dataclasses import replace

import pytest
import torch

from hybridserve.parallel.comm_benchmark import implementations as registry
from hybridserve.parallel.comm_benchmark.checks import check_result, drawn
from hybridserve.parallel.comm_benchmark.counting import CountedCall, counted
from hybridserve.parallel.comm_benchmark.implementations import implementations, not_measured
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


def test_what_cannot_run_says_why() -> None:
    group = TensorParallelGroup(0, 2, KnownRanks(), why_no_peers="rank 1 is on another host")
    names = ("one_shot", "two_shot", "one_shot_rms_norm", "low_latency", "low_latency_rms_norm")
    assert not_measured(group, "gloo") == {
        f"all_reduce/{name}": "rank 1 is on another host" for name in names
    }
    [nccl] = (one for one in implementations("all_gather") if one.name == "nccl")
    assert nccl.unavailable(group, "gloo", 8) == "the backend is gloo"
    assert nccl.unavailable(group, "nccl", 8) is None


def test_an_implementation_is_registered_once(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    new = replace(implementations("all_reduce")[0], name="new")
    registry.register(new)
    assert new in implementations("all_reduce")
    with pytest.raises(ValueError, match="all_reduce has an implementation named 'new' already"):
        registry.register(replace(new))


def test_sums_by_peers_are_counted_as_all_reduces() -> None:
    group, counter = counted(TensorParallelGroup(0, 2, KnownRanks(), peers=Doubled()))
    assert torch.equal(group.all_reduce(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    group.peers.sum_and_norm(torch.ones(2, 4), torch.zeros(2, 4), None)
    # too long for the peers
    group.all_reduce(torch.ones(12))
    assert [call.num_bytes for call in counter.calls] == [32, 32, 48]


class Doubled:
    """Peers that hold what this rank holds."""

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return rows == 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def sum_and_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: object) -> tuple:
        return x * 2 + residual, x
