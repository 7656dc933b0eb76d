"""How long collectives take, from a report or from assumed latencies, and what share of a step that is.

Torch-free. Knows nothing of models: a step is its time without communication and its messages.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridserve.parallel.comm_benchmark.formulas import COLLECTIVES, wire_factor


class Latencies(Protocol):
    """Seconds of a collective."""

    def seconds(self, collective: str, num_bytes: int, ranks: int) -> float: ...


@dataclass(frozen=True)
class AssumedLatencies:
    """alpha + factor(n) * S / busbw: a fixed time a call and the bytes that each rank must send.

    The instances below are of GPUs of one NVLink 4 node, with calls in CUDA graphs and without multicast:
    for 2 ranks as measured on two H200 (docs/performance.md), for 4 and 8 round numbers of ours. A report of
    this benchmark replaces them.
    """

    fixed_s: Mapping[int, float]
    """Ranks -> seconds of the smallest message."""
    busbw: float
    """Bytes per second of the largest ones."""

    def seconds(self, collective: str, num_bytes: int, ranks: int) -> float:
        if ranks not in self.fixed_s:
            raise ValueError(f"ranks must be one of {', '.join(map(str, self.fixed_s))}, got {ranks}")
        return self.fixed_s[ranks] + num_bytes * wire_factor(collective, ranks) / self.busbw


ASSUMED_NCCL = AssumedLatencies({2: 11e-6, 4: 14e-6, 8: 20e-6}, 270e9)
ASSUMED_ONE_SHOT = AssumedLatencies({2: 6e-6, 4: 7e-6, 8: 9e-6}, 270e9)
"""By reading peers' memory."""


@dataclass(frozen=True)
class MeasuredLatencies:
    """Between measured sizes a straight line in log-log, below them the smallest's time, above them the
    largest's bandwidth."""

    points: Mapping[tuple[str, int], tuple[tuple[int, float], ...]]
    """(collective, ranks) -> ascending (bytes, seconds)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({ranks for _, ranks in self.points}))

    def seconds(self, collective: str, num_bytes: int, ranks: int) -> float:
        known = self.points.get((collective, ranks))
        if known is None:
            raise ValueError(f"nothing was measured for {collective} at {ranks} ranks")
        if num_bytes <= known[0][0]:
            return known[0][1]
        for (low, fast), (high, slow) in zip(known, known[1:], strict=False):
            if num_bytes <= high:
                along = math.log(num_bytes / low) / math.log(high / low)
                return fast * (slow / fast) ** along
        return known[-1][1] * num_bytes / known[-1][0]


def read_latencies(files: Sequence[Path]) -> MeasuredLatencies:
    """From the `--json` of runs at one or several numbers of ranks: of each message the fastest median, of
    CUDA graphs where there are any.

    Raises:
        ValueError: a file is no report, or has no collective in it.
    """
    best: dict[tuple[str, int], dict[int, float]] = {}
    for file in files:
        for row in _collectives(file):
            times = best.setdefault((row["collective"], row["ranks"]), {})
            seconds = row["times"]["p50_us"] / 1e6
            times[row["bytes"]] = min(seconds, times.get(row["bytes"], math.inf))
    return MeasuredLatencies({key: tuple(sorted(times.items())) for key, times in best.items()})


def _collectives(file: Path) -> list[dict[str, Any]]:
    try:
        report = json.loads(file.read_text())
        rows = report["collectives"]
        found = {row["collective"] for row in rows}
        graph = any(row["mode"] == "graph" for row in rows)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"measured {str(file)!r} is no report of bench comm: {error!r}") from None
    if found != set(COLLECTIVES):
        raise ValueError(f"measured {str(file)!r} has {sorted(found) or 'no collectives'}, not {COLLECTIVES}")
    return [row for row in rows if row["mode"] == ("graph" if graph else "eager")]


@dataclass(frozen=True)
class Share:
    """One step of one shard."""

    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """With nothing overlapped."""
        return self.compute_s + self.communication_s

    @property
    def share(self) -> float:
        """Communication's part of the step's time."""
        return self.communication_s / self.step_s

    @property
    def overlap_gain(self) -> float:
        """The most that overlap could take off the step's time: the shorter of the two wholly hidden."""
        return min(self.compute_s, self.communication_s) / self.step_s


def expected_share(
    compute_s: float, messages: Sequence[tuple[str, int, int]], ranks: int, latencies: Latencies
) -> Share:
    """messages: (collective, count, bytes)."""
    communication = sum(
        count * latencies.seconds(collective, size, ranks) for collective, count, size in messages
    )
    return Share(compute_s, communication)
