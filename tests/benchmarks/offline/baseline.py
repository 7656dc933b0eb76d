"""An earlier JSON file of the offline benchmark, and how many times faster than it a row is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goals import SPEEDUPS
from rows import Measured

SAME = ("model", "sizes")
"""Of `about`: what two files must share to be compared."""


@dataclass(frozen=True)
class Comparison:
    """One row beside the baseline's."""

    value: float
    """The baseline's, in the row's unit."""
    speedup: float
    """Above 1, the new value is better so many times."""
    goal: float | None
    """The least that `speedup` should be."""

    def line(self, unit: str, ranks: int) -> str:
        told = f"{self.speedup:.2f} x against {self.value:.4g} {unit} at TP {ranks}"
        if self.goal is None:
            return told
        short = 1 - self.speedup / self.goal
        return f"{told}; goal {self.goal:g}: " + ("met" if short <= 0 else f"missed by {short:.1%}")


class Baseline:
    """The rows of one JSON file."""

    def __init__(self, path: Path, about: dict[str, Any], shape: str | None, ranks: int) -> None:
        """about: of the run that is compared. shape: its key in `GOALS`; ranks: its tensor_parallel_size.

        Raises:
            ValueError: the file is none of this benchmark's, or of another model or other sizes.
        """
        try:
            content = json.loads(path.read_text())
            its, rows = content["about"], content["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--against {path} is no JSON file of this benchmark: {error!r}") from None
        for key in SAME:
            # a file of the same name in another folder is the same shape
            ours, theirs = (Path(str(one.get(key))).name for one in (about, its))
            if ours != theirs:
                raise ValueError(f"--against {path} has {key} {theirs!r}, this run {ours!r}")
        self.ranks = its.get("tensor_parallel_size", 1)
        self.differences = {
            key: (its.get(key), about[key])
            for key in ("state_dtype", "device", "torch", "date")
            if its.get(key) != about[key]
        }
        self._rows = {row["name"]: row["value"] for row in rows if "value" in row}
        # they are for ranks against one
        self._goals = SPEEDUPS.get(shape or "", {}).get(ranks, {}) if self.ranks == 1 else {}

    def compare(self, name: str, measured: Measured) -> Comparison | None:
        """None where the baseline has no such row, or one of the values is no positive number."""
        value = self._rows.get(name)
        if value is None or value <= 0 or measured.value <= 0:
            return None
        better = measured.value / value if measured.more_is_better else value / measured.value
        return Comparison(value, better, self._goals.get(name))
