"""Time every Triton kernel on one GPU, each behind a green correctness gate, as a table in Markdown.

    python tests/benchmarks/bench_kernels.py [--only REGEX] [--list] [--ours-only] [--json out.json]

Collects the `cases()` of every module in tests/benchmarks/kernels. Inputs are rotated, so that each call
finds them cold in the L2; calls are replayed from one CUDA graph, so that launch gaps are small; times are
medians. The floor is the larger of bytes at 4.3 TB/s and operations at 790 TFLOP/s (one H200, measured).
Every row is printed, and the JSON file written anew, as soon as it is measured. Exits with 1 if a gate or
a case fails; a case whose gate fails is not timed.
"""

import argparse
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import json
import re
import statistics
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

CASES = Path(__file__).parent / "kernels"
sys.path.insert(0, str(CASES))

from case import Builder, Calls, Case  # noqa: E402

from hybridserve.kernels.testing import H200_BYTES_PER_S, Timing, time_calls  # noqa: E402

COLUMNS = ("operator", "shape", "µs", "rate", "of floor", "goal µs", "verdict", "× plain", "× baseline")
EAGER_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Result:
    """One timed case; a ratio is the other's time over ours."""

    operator: str
    shape: str
    us: float
    min_us: float
    max_us: float
    rate: str
    floor_us: float
    goal_us: float | None
    plain_us: float | None
    baseline_us: float | None

    @property
    def verdict(self) -> str:
        if self.goal_us is None:
            return "–"
        over = self.us / self.goal_us - 1
        return "met" if over <= 0 else f"missed by {over:.0%}"

    def row(self) -> tuple[str, ...]:
        ratios = (f"{t / self.us:.2f}" if t else "–" for t in (self.plain_us, self.baseline_us))
        goal = f"{self.goal_us:.1f}" if self.goal_us else "–"
        share = f"{self.floor_us / self.us:.0%}"
        return (
            self.operator,
            self.shape,
            f"{self.us:.1f}",
            self.rate,
            share,
            goal,
            self.verdict,
            *ratios,
        )


def modules() -> list[ModuleType]:
    """Every module of the folder but `case` itself."""
    return [importlib.import_module(path.stem) for path in sorted(CASES.glob("*.py")) if path.stem != "case"]


def time_eagerly(calls: Calls) -> Timing:
    """The time of one call by events around each, for calls that a graph cannot hold."""
    times = []
    for call in [*calls, *list(calls) * EAGER_ROUNDS]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    # the first round compiles and allocates
    times = times[len(calls) :]
    return Timing(statistics.median(times), min(times), max(times))


def time_builder(build: Builder, in_graph: bool, warm: bool) -> Timing:
    calls = build()[:1] if warm else build()
    timing = time_calls(calls, warm=warm) if in_graph else time_eagerly(calls)
    # the next case wants the memory
    gc.collect()
    torch.cuda.empty_cache()
    return timing


def measure(case: Case, ours_only: bool) -> Result:
    ours = time_builder(case.calls, True, case.warm)
    plain = baseline = None
    if case.plain and not ours_only:
        plain = time_builder(case.plain, case.plain_in_graph, case.warm).median_us
    if case.baseline and not ours_only:
        baseline = time_builder(case.baseline, case.baseline_in_graph, case.warm).median_us
    work, us = case.work, ours.median_us
    memory_bound = work.nbytes / H200_BYTES_PER_S * 1e6 >= work.floor_us()
    rate = f"{work.nbytes / us / 1e3:.0f} GB/s" if memory_bound else f"{work.flops / us / 1e6:.0f} TFLOP/s"
    return Result(
        case.operator,
        case.shape,
        us,
        ours.min_us,
        ours.max_us,
        rate,
        work.floor_us(),
        case.goal_us,
        plain,
        baseline,
    )


def passing(case: Case, ours_only: bool) -> Result | None:
    """Run the gate, then measure; on failure say where, as the cases after it are worth having."""
    doing = "GATE"
    try:
        case.gate()
        gc.collect()
        torch.cuda.empty_cache()
        doing = "TIMING"
        return measure(case, ours_only)
    except Exception:
        print(f"| {case.operator} | {case.shape} | {doing} FAILED |", flush=True)
        traceback.print_exc()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression searched in `operator shape`")
    parser.add_argument("--list", action="store_true", help="name the cases and stop; needs no GPU")
    parser.add_argument("--ours-only", action="store_true", help="do not time plain PyTorch and baselines")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    chosen = [c for m in modules() for c in m.cases() if re.search(args.only, f"{c.operator} {c.shape}")]
    if not chosen:
        parser.error(f"--only {args.only!r} matches no case")
    if args.list:
        print("\n".join(f"{case.operator}: {case.shape}" for case in chosen))
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|", flush=True)
    rows: list[dict[str, object]] = []
    failed: list[str] = []
    for case in chosen:
        result = passing(case, args.ours_only)
        if result is None:
            failed.append(f"{case.operator}: {case.shape}")
        else:
            print("| " + " | ".join(result.row()) + " |", flush=True)
            rows.append(dataclasses.asdict(result) | {"verdict": result.verdict})
        if args.json:
            args.json.write_text(json.dumps(about | {"failed": failed, "results": rows}, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
