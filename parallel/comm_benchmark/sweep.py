"""The first part of the benchmark: each collective by each implementation over the sizes."""

from typing import Any

import torch

from hybridserve.parallel.comm_benchmark.checks import check_result
from hybridserve.parallel.comm_benchmark.formulas import COLLECTIVES, algbw, busbw
from hybridserve.parallel.comm_benchmark.implementations import Implementation, implementations
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings, model_messages
from hybridserve.parallel.comm_benchmark.timing import Meeting, Step, Times, capture, measure
from hybridserve.parallel.group import TensorParallelGroup

CALLS_IN_A_GRAPH = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sweep(
    settings: BenchmarkSettings, group: TensorParallelGroup, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each collective, size, implementation and mode; none for a single rank: it sends nothing."""
    if group.size == 1:
        return []
    rows = []
    for collective in COLLECTIVES:
        sizes = [(size, "") for size in settings.sizes]
        sizes += [(size, label) for kind, label, size in model_messages(settings) if kind == collective]
        for size, label in sizes:
            for implementation in implementations(collective):
                if implementation.unavailable(group, settings.backend, size) is None:
                    rows += _rows(settings, group, device, implementation, size, label)
    return rows


def _rows(
    settings: BenchmarkSettings,
    group: TensorParallelGroup,
    device: torch.device,
    implementation: Implementation,
    size: int,
    label: str,
) -> list[dict[str, Any]]:
    dtype = DTYPES[settings.dtype]
    # whole elements for every rank
    per_rank = max(1, size // settings.itemsize // group.size)
    numel = per_rank if implementation.collective == "all_gather" else per_rank * group.size
    num_bytes = per_rank * group.size * settings.itemsize
    x = torch.empty(numel, dtype=dtype, device=device)
    run = implementation.prepare(group, x)
    error = check_result(implementation, group, x, run, settings.seed)
    # sums of zeros stay finite however often they are summed in place
    x.zero_()
    steps: list[tuple[str, Step, int]] = [("eager", run, 1)]
    if device.type == "cuda" and implementation.capturable:
        steps.append(("graph", capture(run, CALLS_IN_A_GRAPH), CALLS_IN_A_GRAPH))
    rows = []
    for mode, step, calls in steps:
        (times,) = measure(
            [step],
            Meeting(group, device),
            row_seconds=settings.row_seconds,
            min_replays=settings.min_replays,
            max_replays=settings.max_replays,
            calls=calls,
        )
        rows.append(_row(implementation, mode, label, num_bytes, times, group.size, error))
    return rows


def _row(
    implementation: Implementation,
    mode: str,
    label: str,
    num_bytes: int,
    times: Times,
    ranks: int,
    error: float,
) -> dict[str, Any]:
    seconds = times.p50_us / 1e6
    return {
        "collective": implementation.collective,
        "implementation": implementation.name,
        "mode": mode,
        "ranks": ranks,
        "label": label,
        "bytes": num_bytes,
        "times": times.as_json(),
        "algbw_gbps": algbw(num_bytes, seconds) / 1e9,
        "busbw_gbps": busbw(implementation.collective, num_bytes, seconds, ranks) / 1e9,
        "max_error": error,
    }
