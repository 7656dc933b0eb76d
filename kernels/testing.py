"""What tests and benchmarks of kernels share: errors against a truth, poisoned memory, floors, a timer.

A tolerance is derived, not guessed: a kernel may err at most twice as much as plain PyTorch in the same
dtype, both measured against fp64. Nothing here is imported by the operators themselves.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

H200_BYTES_PER_S = 4.3e12
"""Measured device-to-device copy of one H200, bytes read plus bytes written."""
H200_BF16_FLOPS = 790e12
"""Measured 8192^3 bf16 matrix product of one H200 on random data."""
L2_BYTES = 60 * 2**20


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """|out - truth| / |truth| in fp64, Euclidean norms; inf where either holds a NaN."""
    truth = truth.detach().double()
    out = out.detach().to(truth.device, torch.float64)
    error = (out - truth).norm() / truth.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float("inf") if torch.isnan(error) else error.item()


def assert_as_good_as_plain(
    out: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, factor: float = 2.0
) -> None:
    """Assert that `out` errs at most `factor` times as much as plain PyTorch does in the same dtype.

    out, plain: of one dtype. truth: fp64. Half a unit in the last place is always granted, so that a plain
    result that happens to be exact asks nothing impossible.
    """
    allowed = factor * max(relative_error(plain, truth), torch.finfo(out.dtype).eps / 2)
    error = relative_error(out, truth)
    # where plain PyTorch overflows, too, infinitely much would be allowed
    assert error <= allowed and math.isfinite(error), (
        f"error {error:.3g} against fp64, at most {allowed:.3g} is allowed"
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While it lasts, `torch.empty` and `torch.empty_like` return NaN (or the dtype's largest integer)."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return made

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
    ):
        yield


@dataclass(frozen=True)
class Work:
    """The least an operator must do: each byte once, each operation once."""

    nbytes: int = 0
    flops: int = 0

    def floor_us(self, bytes_per_s: float = H200_BYTES_PER_S, flops_per_s: float = H200_BF16_FLOPS) -> float:
        """Microseconds below which no version can run; the larger of the two terms."""
        return max(self.nbytes / bytes_per_s, self.flops / flops_per_s) * 1e6


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    min_us: float
    max_us: float


def rotations(nbytes: int) -> int:
    """How many sets of inputs of `nbytes` bytes must be rotated so that none is found in the L2."""
    return max(2, -(-3 * L2_BYTES // max(nbytes, 1)))


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = 20, warm: bool = False) -> Timing:
    """Time one call on the GPU, by CUDA events around replays of one graph that makes every call once.

    calls: the same operation on different inputs, enough of them (see `rotations`) that each finds its inputs
        cold; with `warm`, one call on inputs left in the L2. They must be capturable: no synchronisation.
    Returns the time of one replay divided by the number of calls, over `repeats` replays.
    """
    assert warm or len(calls) > 1, "one call would find its own inputs in the L2"
    calls = list(calls) * 10 if warm else list(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    # the first replays upload the graph and wake the clocks
    times = times[3:]
    return Timing(statistics.median(times), min(times), max(times))
