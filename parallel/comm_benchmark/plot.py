"""Bytes and time of the strategies against ranks, drawn with matplotlib, which the extra `bench` installs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Curve:
    """One strategy in one case."""

    strategy: str
    ranks: tuple[int, ...]
    wire_bytes_per_token: tuple[float, ...]
    microseconds: tuple[float, ...]
    """Of a layer's step with communication, median."""


def check_plot(path: Path) -> None:
    """Say before anything is measured what would fail afterwards.

    Raises:
        ValueError: matplotlib is not installed, or the file's ending or folder will not do.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"plot must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"plot {str(path)!r}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "plot needs matplotlib, which is not installed: pip install 'hybridserve[bench]'"
        ) from None


def curves(report: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """Case -> its strategies' curves, from CUDA graphs where there are such rows."""
    rows = [row for row in report["strategies"] if "unavailable" not in row]
    found: dict[str, list[Curve]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        mode = "graph" if any(row["mode"] == "graph" for row in of_case) else "eager"
        of_case = [row for row in of_case if row["mode"] == mode]
        for strategy in dict.fromkeys(row["strategy"] for row in of_case):
            found.setdefault(case, []).append(
                _curve(strategy, [row for row in of_case if row["strategy"] == strategy])
            )
    return found


def _curve(strategy: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    rows = sorted(rows, key=lambda row: row["ranks"])
    return Curve(
        strategy,
        tuple(row["ranks"] for row in rows),
        tuple(row["wire_bytes_per_token"] for row in rows),
        tuple(row["with_communication"]["p50_us"] for row in rows),
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot: a column a case, bytes above time, ranks along the axis.

    Raises:
        ValueError: see `check_plot`.
    """
    check_plot(path)
    # without pyplot: no window system, and no state that outlives the figure
    from matplotlib.figure import Figure

    cases = curves(report)
    figure = Figure(figsize=(4 * len(cases), 7), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, (case, lines) in enumerate(cases.items()):
        upper, lower = axes[0][column], axes[1][column]
        for line in lines:
            # one rank sends nothing, and a logarithmic axis has no place for it
            sent = [(n, b) for n, b in zip(line.ranks, line.wire_bytes_per_token, strict=True) if b > 0]
            if sent:
                upper.plot(*zip(*sent, strict=True), marker="o", label=line.strategy)
            lower.plot(line.ranks, line.microseconds, marker="o", label=line.strategy)
        upper.set(title=case, yscale="log", ylabel="bytes sent by each rank per token")
        lower.set(xlabel="ranks", yscale="log", ylabel="microseconds a layer and step")
        for axis in (upper, lower):
            axis.set_xticks(sorted({n for line in lines for n in line.ranks}))
            axis.grid(alpha=0.3)
    axes[1][0].legend(fontsize="small")
    settings = report["settings"]
    figure.suptitle(f"{settings['layer']['name']}, {settings['backend']}, {settings['dtype']}")
    figure.savefig(path)
