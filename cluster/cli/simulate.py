"""`hybridserve simulate CONFIG`: a configuration's cluster in virtual time, and where to cut its buckets.

Owns the options and the tables. Starts no Ray, reads no weights, imports no torch.
"""

import json
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybridserve.cluster.serve_file import read_application
from hybridserve.cluster.settings_reading import parse_settings
from hybridserve.cluster.simulation import tables, workload
from hybridserve.cluster.simulation.build import Assumptions, cluster_model
from hybridserve.cluster.simulation.cluster import ClusterRun, SimulatedCluster
from hybridserve.cluster.simulation.merging import merged_pools
from hybridserve.cluster.simulation.outcomes import Figures, Slo, figures
from hybridserve.cluster.simulation.step_curve import (
    CurveFile,
    StepCurve,
    curve_errors,
    fit_curve,
    read_curve,
)
from hybridserve.cluster.simulation.sweep import Sweep, sweep_cuts
from hybridserve.cluster.sizes import parse_size
from hybridserve.replicas.models.config import load_model_config

_WIDTH = 170


def simulate(
    config: Annotated[Path, typer.Argument(help="Serve YAML, like configs/h200x8.yaml.")],
    curve: Annotated[Path, typer.Option(help="Measured steps, like those of configs/step-curves.")],
    trace: Annotated[Path, typer.Option(help="CSV with the columns of the Azure LLM inference traces.")],
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, lengths drawn; else the trace's own times.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Of the trace's gaps.")] = 1.0,
    num_requests: Annotated[int | None, typer.Option(help="By default the trace's.", min=1)] = None,
    scale: Annotated[float, typer.Option(help="Of prompts' lengths.")] = 1.0,
    answer_scale: Annotated[float | None, typer.Option(help="Of answers' lengths, else --scale.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    silent_clients: Annotated[
        bool, typer.Option("--silent-clients", help="Clients leave max_tokens out.")
    ] = False,
    priority: Annotated[str, typer.Option(help="A mix, like high=0.1,normal=0.9.")] = "normal",
    compare: Annotated[bool, typer.Option("--compare", help="Also with all pools in one.")] = False,
    sweep_cuts: Annotated[
        str | None, typer.Option(help="Try two buckets cut at these lengths, like 512,1024,2048.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="With --sweep-cuts: of both buckets; by default the config's.")
    ] = None,
    short: Annotated[
        int | None, typer.Option(help="With --sweep-cuts: the longest request whose first token counts.")
    ] = None,
    floor: Annotated[
        float, typer.Option(help="With --sweep-cuts: least share of the merged pool's tokens/s.")
    ] = 0.95,
    model: Annotated[
        str | None, typer.Option(help="Shape or checkpoint: memory counts, and shards are reckoned.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Of one GPU.")] = "141GB",
    device: Annotated[str, typer.Option(help="cuda or cpu: how steps are planned.")] = "cuda",
    overhead_ms: Annotated[
        float, typer.Option(help="That lies between client and engine, at the first token.")
    ] = 0.0,
    start_s: Annotated[float, typer.Option(help="From a decision to a replica that serves.")] = 20.0,
    slo_ttft_ms: Annotated[float, typer.Option(help="An answer keeps to it or is not good.")] = 1000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Likewise, of the mean time between tokens.")] = 100.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here.")] = None,
) -> None:
    """Simulate a configuration's pools under a load, or find where to cut the buckets."""
    if plot is not None:
        tables.check_plot(plot)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {device!r}")
    for name, value in (("replicas", replicas), ("short", short)):
        if value is not None and sweep_cuts is None:
            raise ValueError(f"{name} is read with --sweep-cuts only, got {value}")
    args = dict(read_application(config)[1].get("args", {}))
    settings = parse_settings(args)
    file = read_curve(curve)
    fitted = fit_curve(file)
    given = Assumptions(
        device=device,
        shape=None if model is None else load_model_config(model),
        gpu_bytes=parse_size("gpu_memory", gpu_memory),
        overhead_s=overhead_ms / 1e3,
        start_s=start_s,
    )
    shape = workload.Shape(
        scale, scale if answer_scale is None else answer_scale, max_tokens, settings.model.max_context_length
    )
    rng = random.Random(seed)
    load = _load(trace, shape, num_requests, rate, time_scale, rng)
    load = workload.with_priorities(load, workload.parse_priorities(priority), rng)
    if silent_clients:
        load = [replace(one, says_max_tokens=False) for one in load]
    console = _console()
    _say_steps(console, file, fitted)
    if sweep_cuts is not None:
        cuts = _lengths("sweep_cuts", sweep_cuts)
        total = replicas
        if total is None:
            total = sum(spec.replicas.max for spec in settings.pool_specs())
        swept = _sweep(console, args, fitted, given, load, cuts, total, short, floor, seed)
        if json_file is not None:
            json_file.write_text(json.dumps(asdict(swept), indent=1))
        if plot is not None:
            tables.draw_sweep(swept, plot)
        return
    slo = Slo(slo_ttft_ms / 1e3, slo_itl_ms / 1e3)
    runs = _runs(console, args, fitted, given, load, compare, slo, seed)
    title = f"{config}, {len(load):,} requests" + ("" if rate is None else f" at {rate:g} a second")
    console.print(tables.figures_table(runs, title))
    if json_file is not None:
        content = {name: tables.figures_json(found) for name, found in runs.items()}
        json_file.write_text(json.dumps(content, indent=1))
    if plot is not None:
        tables.draw_figures(runs, plot, title)


def _load(
    trace: Path,
    shape: workload.Shape,
    num_requests: int | None,
    rate: float | None,
    time_scale: float,
    rng: random.Random,
) -> list[workload.Arrival]:
    rows = [shape.apply(row) for row in workload.read_trace(trace)]
    count = len(rows) if num_requests is None else num_requests
    if rate is None:
        return workload.at_trace_times(rows, count, time_scale)
    return workload.poisson(rows, count, rate, rng)


def _say_steps(console: Console, file: CurveFile, curve: StepCurve) -> None:
    """Where steps' times are from, and what the curve does not go through."""
    _say(console, f"steps: {file.name} ({file.source})")
    for what, ms, by_curve in curve_errors(file, curve):
        if abs(by_curve / ms - 1) > 0.005:
            _say(console, f"  {what}: measured {ms:g} ms, by the curve {by_curve:.4g} ms")


def _runs(
    console: Console,
    args: dict[str, object],
    curve: StepCurve,
    given: Assumptions,
    load: list[workload.Arrival],
    compare: bool,
    slo: Slo,
    seed: int,
) -> dict[str, Figures]:
    """The configuration's own run, and that of its pools merged."""
    specs = parse_settings(args).pool_specs()
    edges = [spec.max_prompt_tokens for spec in specs if spec.max_prompt_tokens is not None]
    ways = {"pools": args}
    if compare:
        ways["merged"] = merged_pools(args)
    found = {}
    for name, each in ways.items():
        began = time.process_time()
        cluster = SimulatedCluster(cluster_model(parse_settings(each), curve, given), seed)
        run = cluster.run(load)
        _say(console, f"{name}: {_speed(run, time.process_time() - began)}")
        console.print(_pools_table(name, run))
        found[name] = figures(run.outcomes, edges, slo)
    return found


def _speed(run: ClusterRun, cpu_s: float) -> str:
    return (
        f"{run.seconds:,.1f} s in {cpu_s:.1f} s of CPU, {run.num_events:,} events "
        f"({run.num_events / cpu_s:,.0f} a second), {run.num_steps:,} steps"
    )


def _pools_table(name: str, run: ClusterRun) -> Table:
    table = Table(title=f"pools of {name!r}", title_justify="left")
    for column in ("pool", "replicas, mean", "most", "busy", "preemptions", "requests by decision"):
        table.add_column(column, justify="left" if column in ("pool", "requests by decision") else "right")
    for pool in run.pools:
        table.add_row(
            pool.name,
            f"{pool.mean_replicas:,.1f}",
            f"{pool.most_replicas:,}",
            f"{pool.busy_share:.0%}",
            f"{pool.preemptions:,}",
            ", ".join(f"{what} {count:,}" for what, count in sorted(pool.decisions.items())) or "-",
        )
    return table


def _sweep(
    console: Console,
    args: dict[str, object],
    curve: StepCurve,
    given: Assumptions,
    load: list[workload.Arrival],
    cuts: list[int],
    replicas: int,
    short: int | None,
    floor: float,
    seed: int,
) -> Sweep:
    swept = sweep_cuts(
        args,
        lambda settings: cluster_model(settings, curve, given),
        load,
        cuts,
        replicas=replicas,
        short=short,
        floor=floor,
        seed=seed,
    )
    console.print(tables.sweep_table(swept))
    best, merged = swept.best, swept.ways[0]
    if best is None or best.short_p99_s is None or not merged.short_p99_s:
        _say(console, f"no cut keeps {floor:.0%} of the merged pool's tokens a second")
        return swept
    share, tokens = best.short_p99_s / merged.short_p99_s, best.tokens_per_s / merged.tokens_per_s
    _say(
        console,
        f"cut at {best.cut:,}, {best.short_replicas} replicas below and {best.long_replicas} above: requests "
        f"up to {swept.short:,} tokens have their first token in {best.short_p99_s * 1e3:,.0f} ms (p99), "
        f"{share:.2f} of the merged pool's {merged.short_p99_s * 1e3:,.0f}, at {tokens:.1%} of its tokens/s",
    )
    return swept


def _lengths(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be whole numbers like 512,1024, got {text!r}") from None


def _console() -> Console:
    """The terminal; a file or a pipe gets lines as long as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
