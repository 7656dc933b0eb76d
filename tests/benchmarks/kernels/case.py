"""What a module of this folder declares for `bench_kernels.py`: one `Case` per operator and shape.

A module has `cases() -> list[Case]`, which makes no tensor and needs no GPU, and may have
`warmups() -> list[Callable[[], object]]` for `kernels_compile.py`: calls on the smallest inputs that, between
them, compile every kernel variant that a Qwen3.5-9B step launches; each is independent of the others. Modules
import this file as `from case import Case`. Knows nothing of any operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridserve.kernels.testing import Work, rotations

Calls = Sequence[Callable[[], object]]
"""The same operation on different inputs, at least `rotations(bytes of one set)` of them, so that none finds
its inputs in the L2; capturable in a CUDA graph: no synchronisation, no transfer from the host."""

Builder = Callable[[], Calls]
"""Allocates inputs on the GPU (random, never zeros) and returns the calls on them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the benchmark's table."""

    operator: str
    """Operator and variant, such as `rms_norm residual`; `--only` is searched in `operator shape`."""
    shape: str
    """Sizes as a reader wants them, such as `8192 x 4096 bf16`."""
    work: Work
    """Of one call at the least: each input byte read once, each output byte written once."""
    calls: Builder
    """Our kernel."""
    gate: Callable[[], None]
    """Raises AssertionError unless our kernel is right on fresh random inputs of this case's kind (smaller
    ones where fp64 would take long); runs before anything is timed."""
    goal_us: float | None = None
    """Microseconds that one call may take; see `goal_at` for goals given as a share of the ceiling."""
    plain: Builder | None = None
    """The same in plain PyTorch operations of the same dtype."""
    plain_in_graph: bool = True
    """False where the plain version synchronises, so that it is timed call by call."""
    baseline: Builder | None = None
    """The same by another library, where it is installed; an empty launch for latencies."""
    baseline_in_graph: bool = True
    warm: bool = False
    """Time the first call alone, its inputs left in the L2, as a decode step's activations are."""


def goal_at(work: Work, fraction: float) -> float:
    """Microseconds of `work` at `fraction` of the larger ceiling (4.3 TB/s, 790 TFLOP/s of one H200)."""
    return work.floor_us() / fraction


def rotated(make: Callable[[], Callable[[], object]], work: Work) -> Calls:
    """Calls on enough sets of inputs of `work` bytes each; `make` allocates one set and returns its call."""
    return [make() for _ in range(rotations(work.nbytes))]
