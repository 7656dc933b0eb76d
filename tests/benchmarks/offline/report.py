"""The offline benchmark's table, row by row, and its JSON file, written anew with every row."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baseline import Baseline
from goals import Goal
from rows import Measured

WIDTHS = (30, 10, 10, 18, 9, 6, 8)
HEADINGS = ("workload", "ours", "unit", "spread", "vLLM", "ratio", "goal", "verdict")
NOTHING = "–"


class Report:
    def __init__(self, about: dict[str, Any], path: Path | None, baseline: Baseline | None = None) -> None:
        """`about`: what was measured on what; `path`: of the JSON file, None for none; `baseline`: what every
        row is compared with."""
        self._contents: dict[str, Any] = {"about": about, "rows": [], "profiles": {}, "skipped": {}}
        self._path = path
        self._baseline = baseline
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        if baseline is not None:
            for key, (theirs, ours) in baseline.differences.items():
                print(f"compared with a run of {key} {theirs}, this one's is {ours}")
        print(_line(HEADINGS), flush=True)

    def add(self, name: str, measured: Measured, goal: Goal) -> None:
        """A row; `goal` unless the row brought its own. Above 1, `ratio` is in our favour."""
        goal = measured.goal or goal
        ratio = None
        if goal.vllm:
            ratio = measured.value / goal.vllm if measured.more_is_better else goal.vllm / measured.value
        runs = measured.runs
        cells = (
            name,
            figure(measured.value),
            measured.unit,
            f"{figure(min(runs))} to {figure(max(runs))}" if len(runs) > 1 else NOTHING,
            figure(goal.vllm),
            NOTHING if ratio is None else f"{ratio:.2f}",
            figure(goal.ours),
            verdict(measured, goal),
        )
        print(_line(cells))
        for key, value in measured.notes.items():
            print(f"    {key}: {figure(value)}")
        row = {"name": name, **dataclasses.asdict(measured), "goal": dataclasses.asdict(goal)}
        row |= {"vllm_ratio": ratio, "verdict": cells[-1]}
        if self._baseline is not None and (beside := self._baseline.compare(name, measured)) is not None:
            print(f"    {beside.line(measured.unit, self._baseline.ranks)}")
            row["against"] = {"tensor_parallel_size": self._baseline.ranks, **dataclasses.asdict(beside)}
        self._contents["rows"].append(row)
        self._save()

    def skip(self, name: str, reason: str) -> None:
        """A row that this run cannot have."""
        print(f"{name}: skipped: {reason}")
        self._contents["skipped"][name] = reason
        self._save()

    def add_failure(self, name: str, error: Exception) -> None:
        print(f"{name}: FAILED: {error}")
        self._contents["rows"].append({"name": name, "error": str(error)})
        self._save()

    def add_profile(self, name: str, profile: dict[str, Any]) -> None:
        """What `step_profile` found."""
        total = profile["total_ms"]
        print(
            f"{name}: {total:.3f} ms, {profile['launches']} kernels, first to last {profile['span_ms']:.3f}"
        )
        for group in ("parts_ms", "kernels_ms"):
            for part, ms in profile[group].items():
                print(f"    {ms:10.3f} ms {ms / total:6.1%}  {part}")
        self._contents["profiles"][name] = profile
        self._save()

    def _save(self) -> None:
        sys.stdout.flush()
        if self._path:
            self._path.write_text(json.dumps(self._contents, indent=1))


def verdict(measured: Measured, goal: Goal) -> str:
    """Whether the goal is met, by how much it is missed, and what comes next."""
    if goal.ours is None:
        return NOTHING
    share = measured.value / goal.ours - 1
    short = -share if measured.more_is_better else share
    if short > 0:
        return f"missed by {short:.1%}"
    if goal.further is None:
        return "met"
    beyond = measured.value / goal.further - 1
    return f"met, {goal.further:g} too" if beyond <= 0 else f"met; {goal.further:g} missed by {beyond:.1%}"


def figure(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    aligned = [f"{cells[0]:<{WIDTHS[0]}}"]
    aligned += [f"{cell:>{width}}" for cell, width in zip(cells[1:-1], WIDTHS[1:], strict=True)]
    return " ".join((*aligned, cells[-1]))
