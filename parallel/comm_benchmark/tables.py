"""The report as tables for a terminal. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Report = Mapping[str, Any]


def heading(report: Report) -> list[str]:
    """What was measured and where, a line each."""
    settings, where = report["settings"], report["environment"]
    layer = settings["layer"]
    lines = [
        f"{settings['backend']}, {settings['tp_size']} ranks, {settings['dtype']}, layer of {layer['name']}: "
        f"hidden {layer['hidden_size']}, {layer['num_k_heads']} key heads x {layer['head_k_dim']}, "
        f"{layer['num_v_heads']} value heads x {layer['head_v_dim']}",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}; "
        + ", ".join(f"{name} {version}" for name, version in where["versions"].items()),
        "switches: " + ", ".join(f"{name}={value}" for name, value in where["switches"].items()),
    ]
    if "nodes" in where:
        lines.append(f"nodes of the ranks: {', '.join(where['nodes'])}")
    if "gpu" in where:
        lines += [where["gpu"]["name"], where["gpu"]["topology"], where["gpu"]["nvlink"]]
    if settings["quick"]:
        lines.append("quick: layer and batches are small, replays few; times say little, bytes are exact")
    return lines


def collectives_table(report: Report) -> Table:
    """A row for each size, of the slowest rank of each replay."""
    table = Table(title=f"collectives, {report['settings']['tp_size']} ranks", title_justify="left")
    for name in ("collective", "by", "mode", "message"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "replays", "p50 us", "p90 us", "p99 us", "algbw GB/s", "busbw GB/s"):
        table.add_column(name, justify="right", overflow="fold")
    for row in report["collectives"]:
        times = row["times"]
        table.add_row(
            row["collective"],
            row["implementation"],
            row["mode"],
            row["label"],
            f"{row['bytes']:,}",
            str(times["replays"]),
            *(f"{times[name]:,.1f}" for name in ("p50_us", "p90_us", "p99_us")),
            *(f"{row[name]:.3f}" for name in ("algbw_gbps", "busbw_gbps")),
        )
    return table


def strategies_table(report: Report) -> Table:
    """What communication costs each strategy of a linear-attention layer."""
    table = Table(title="one linear-attention layer, one step", title_justify="left")
    for name in ("case", "strategy", "ranks", "mode"):
        table.add_column(name, overflow="fold")
    for name in (
        "us",
        "compute us",
        "share",
        "overlap >= us",
        "replays",
        "message B/token",
        "wire B/token",
        "state B/step",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for row in report["strategies"]:
        first = (row["case"], row["strategy"], str(row["ranks"]))
        if "unavailable" in row:
            table.add_row(*first, row["unavailable"])
            continue
        table.add_row(
            *first,
            row["mode"],
            f"{row['with_communication']['p50_us']:,.1f}",
            f"{row['compute_only']['p50_us']:,.1f}",
            f"{row['share']:.1%}" if row["ranks"] > 1 else "-",
            f"{row['overlap_bound_us']:,.1f}",
            str(row["with_communication"]["replays"]),
            f"{row['message_bytes_per_token']:,.0f}",
            f"{row['wire_bytes_per_token']:,.0f}",
            f"{row['state_wire_bytes']:,.0f}",
        )
    return table


NOTES = (
    "Times are medians of the slowest rank. Wire bytes are what each rank must send at least, counted at the "
    "process group; they do not depend on the machine.",
    "overlap: the larger of computing and communicating. A layer's last message waits for all of its "
    "computing, so only other work (a second half of the batch, the next weights' reading) could hide it.",
)


def not_measured(report: Report) -> Sequence[str]:
    return [f"not measured: {name}: {why}" for name, why in report["not_measured"].items()]
