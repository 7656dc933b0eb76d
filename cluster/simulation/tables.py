"""Runs' figures as a table for the terminal, as JSON's own types, and as a plot."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from hybridserve.cluster.simulation.outcomes import Figures, Quantiles
from hybridserve.cluster.simulation.sweep import Sweep, best_way


def figures_table(runs: Mapping[str, Figures], title: str) -> Table:
    """A row for each run and bucket; times in ms."""
    table = Table(title=title, title_justify="left")
    table.add_column("run")
    table.add_column("prompt and answer")
    table.add_column("requests", justify="right")
    for name in ("TTFT", "between tokens", "end to end"):
        table.add_column(f"{name}, ms\np50 / p90 / p99", justify="right")
    for name in ("good/s", "good", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("not ok")
    for run, found in runs.items():
        for one in found.buckets:
            last = one is found.buckets[-1]
            table.add_row(
                run,
                one.name,
                f"{one.requests:,}",
                *(milliseconds(each) for each in (one.ttft, one.itl, one.e2e)),
                f"{one.goodput_per_s:.2f}",
                f"{one.goodput_share:.1%}",
                f"{found.tokens_per_s:,.0f}" if last else "",
                ", ".join(f"{count} {why}" for why, count in sorted(one.ends.items())) or "-",
                end_section=last,
            )
    return table


def milliseconds(of: Quantiles) -> str:
    """ "p50 / p90 / p99", or "-" where nothing was measured."""
    if of.p50 is None or of.p90 is None or of.p99 is None:
        return "-"
    return " / ".join(f"{value * 1e3:,.{0 if value > 0.1 else 1}f}" for value in (of.p50, of.p90, of.p99))


def figures_json(found: Figures) -> dict[str, object]:
    """All of it, `tokens_per_s` too."""
    return {**asdict(found), "tokens_per_s": found.tokens_per_s}


def check_plot(path: Path) -> None:
    """Say before anything is run what would fail afterwards.

    Raises:
        ValueError: matplotlib is not installed, or the file's ending or folder will not do.
    """
    # its module imports no torch
    from hybridserve.parallel.comm_benchmark.plot import check_plot as check

    check(path)


def draw_figures(runs: Mapping[str, Figures], path: Path, title: str) -> None:
    """TTFT and time between tokens by bucket, p50 as bars and p99 as marks, a colour a run."""
    # without pyplot: no window system, and no state that outlives the figure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    names = [one.name for one in next(iter(runs.values())).buckets]
    width = 0.8 / len(runs)
    for axis, what, label in ((axes[0], "ttft", "time to first token"), (axes[1], "itl", "between tokens")):
        for index, (run, found) in enumerate(runs.items()):
            places = [at + (index - (len(runs) - 1) / 2) * width for at in range(len(names))]
            of = [getattr(one, what) for one in found.buckets]
            p50 = [1e3 * (each.p50 or 0.0) for each in of]
            bars = axis.bar(places, p50, 0.9 * width, label=f"{run}, p50")
            p99 = [float("nan") if each.p99 is None else 1e3 * each.p99 for each in of]
            colour = bars.patches[0].get_facecolor()
            axis.plot(places, p99, "_", markersize=18, color=colour, label=f"{run}, p99")
        axis.set_xticks(range(len(names)), names)
        axis.set(title=label, ylabel="ms", yscale="log", xlabel="tokens of prompt and answer")
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path)


def sweep_table(swept: Sweep) -> Table:
    """A row a way, the best one marked."""
    merged = swept.ways[0]
    title = f"first tokens, p99 in ms; in brackets, of the merged pool's; short: up to {swept.short:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("cut")
    for name in ("short + long", "short", "up to the cut", "above it", "all", "tokens/s", "served"):
        table.add_column(name, justify="right")
    for way in swept.ways:
        best = "* " if way is swept.best else ""
        table.add_row(
            f"{best}{'merged' if way.cut is None else f'{way.cut:,}'}",
            f"{way.short_replicas} + {way.long_replicas}" if way.cut is not None else f"{way.short_replicas}",
            _beside(way.short_p99_s, merged.short_p99_s),
            _beside(way.bucket_p99_s, way.bucket_merged_p99_s),
            _beside(way.long_p99_s, way.long_merged_p99_s),
            _beside(way.all_p99_s, merged.all_p99_s),
            f"{way.tokens_per_s:,.0f} ({way.tokens_per_s / merged.tokens_per_s:.1%})",
            f"{way.served_share:.1%}",
        )
    return table


def _beside(seconds: float | None, merged: float | None) -> str:
    if seconds is None:
        return "-"
    share = f" ({seconds / merged:.2f})" if merged else ""
    return f"{seconds * 1e3:,.0f}{share}"


def draw_sweep(swept: Sweep, path: Path) -> None:
    """First tokens of short and of all requests against the cut, of each cut's best split."""
    from matplotlib.figure import Figure

    merged = swept.ways[0]
    cuts = sorted({way.cut for way in swept.ways if way.cut is not None})
    best = [best_way([merged, *(way for way in swept.ways if way.cut == cut)], swept.floor) for cut in cuts]
    found = [way for way in best if way is not None]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for label, attribute, colour in (("short", "short_p99_s", "C0"), ("all", "all_p99_s", "C1")):
        values = [1e3 * getattr(way, attribute) for way in found]
        axis.plot([way.cut for way in found], values, "o-", color=colour, label=f"{label}, two buckets")
        of_merged = getattr(merged, attribute)
        if of_merged is not None:
            axis.axhline(1e3 * of_merged, color=colour, linestyle="--", label=f"{label}, merged")
    axis.set(xlabel="cut, tokens of prompt and answer", ylabel="p99 to the first token, ms", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path)
