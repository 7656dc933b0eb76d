"""`hybridserve bench`: measurements of this machine or this cluster. Owns options and where results go."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hybridserve.cluster.cli.output_file import check_writable
from hybridserve.cluster.comm_expectation import H200, RANKS, expectation_table
from hybridserve.cluster.sizes import parse_size
from hybridserve.parallel.comm_benchmark import plot as plots
from hybridserve.parallel.comm_benchmark import tables
from hybridserve.parallel.comm_benchmark.expectation import ASSUMED_NCCL, ASSUMED_ONE_SHOT, read_latencies
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings, LayerShape, make_settings
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.specs import LinearAttentionSpec

bench = typer.Typer(help="Measure this machine or this cluster.", no_args_is_help=True)

_FILE_WIDTH = 170
# Qwen3.5-9B, so that no file is needed
_DEFAULT_LAYER = LayerShape("qwen3.5-9b", 4096, 16, 32, 128, 128)


@bench.callback()
def _bench() -> None:
    """Measure this machine or this cluster."""


@bench.command()
def comm(
    tp: Annotated[int | None, typer.Option(help="Ranks; by default the GPUs, or 2 on a CPU.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Shape file or checkpoint folder; by default Qwen3.5-9B's sizes.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, gloo (CPU) or nccl (GPUs).")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="By default float32 on a CPU, else bfloat16.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Messages of the sweep, like 1KiB,64KiB; by default powers of two.")
    ] = None,
    max_size: Annotated[str | None, typer.Option(help="Largest message, such as 16MiB.")] = None,
    row_seconds: Annotated[
        float | None, typer.Option(help="What a row's replays may take; by default 15, or 4 on a CPU.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bytes and time against ranks here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and layer, few replays.")] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Run on this Ray cluster (auto: the running one)."),
    ] = None,
    expect: Annotated[
        bool, typer.Option("--expect", help="Measure nothing: print the expected share of communication.")
    ] = False,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="With --expect: a report's JSON in place of assumed latencies; may be repeated."),
    ] = None,
) -> None:
    """Measure collectives, and what they cost each way to spread a linear-attention layer."""
    if measured and not expect:
        raise ValueError("measured is read with --expect only")
    for name, file in (("json", json_file), ("plot", plot)):
        if file is not None:
            check_writable(name, file)
    if expect:
        options = {"tp": tp, "sizes": sizes, "max_size": max_size, "row_seconds": row_seconds, "dtype": dtype}
        options |= {"json": json_file, "plot": plot, "ray_address": ray_address, "quick": quick or None}
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"expect measures nothing and takes no {name}, got {value}")
        _print_expectation(model, measured or [])
        return
    if plot is not None:
        plots.check_plot(plot)
    if ray_address is not None and (tp is None or backend == "auto"):
        raise ValueError(
            "ray_address needs --tp and --backend: this machine does not show the cluster's GPUs"
        )
    # imports torch
    from hybridserve.parallel.comm_benchmark.launch import choose_backend, default_tp_size, run_local

    backend = choose_backend(backend)
    settings = make_settings(
        _layer_of(model),
        backend=backend,
        tp_size=default_tp_size(backend) if tp is None else tp,
        dtype=dtype,
        sizes=None if sizes is None else tuple(parse_size("sizes", size) for size in sizes.split(",")),
        max_bytes=None if max_size is None else parse_size("max_size", max_size),
        quick=quick,
        row_seconds=row_seconds,
    )
    if not quick:
        typer.echo(
            f"measuring {settings.tp_size} ranks by {backend} takes minutes; --quick: seconds", err=True
        )
    report = run_local(settings) if ray_address is None else _run_on_ray(settings, ray_address)
    _show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None:
        plots.draw(report, plot)


def _run_on_ray(settings: BenchmarkSettings, address: str) -> dict[str, Any]:
    # imports ray, which takes seconds
    from hybridserve.cluster.comm_benchmark import connected, run_on_cluster

    with connected(address):
        return run_on_cluster(settings)


def _show(report: dict[str, Any]) -> None:
    console = _wide_console()
    for line in tables.heading(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report["collectives"]:
        console.print(tables.collectives_table(report))
    console.print(tables.strategies_table(report))
    for line in (*tables.NOTES, *tables.not_measured(report)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _wide_console() -> Console:
    """The terminal; a file or a pipe gets lines as long as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _FILE_WIDTH))


def _print_expectation(model: str | None, measured: list[Path]) -> None:
    if model is None:
        raise ValueError("expect needs --model: a whole model's step is computed from its shape")
    config = load_model_config(model)
    console = _wide_console()
    if measured:
        latencies = read_latencies(measured)
        told = f"latencies measured: {', '.join(map(str, measured))}"
        tables_of = [(told, latencies, latencies.ranks)]
    else:
        whence = "of 2 ranks as on two H200, of 4 and 8 ASSUMED"
        tables_of = [
            (f"latencies of NCCL in CUDA graphs: {whence}", ASSUMED_NCCL, RANKS),
            (f"latencies of sums by reading peers' memory: {whence}", ASSUMED_ONE_SHOT, RANKS),
        ]
    for told, latencies, ranks in tables_of:
        console.print(f"computing: {H200}", markup=False, highlight=False, soft_wrap=True)
        console.print(told, markup=False, highlight=False, soft_wrap=True)
        console.print(expectation_table(Path(model).stem, config, latencies, ranks))


def _layer_of(model: str | None) -> LayerShape:
    if model is None:
        return _DEFAULT_LAYER
    config = load_model_config(model)
    spec = next((mixer for mixer in config.mixers if isinstance(mixer, LinearAttentionSpec)), None)
    if spec is None:
        raise ValueError(f"model {model} has no linear-attention layer")
    return LayerShape(
        name=Path(model).stem,
        hidden_size=config.hidden_size,
        num_k_heads=spec.total_num_k_heads,
        num_v_heads=spec.total_num_v_heads,
        head_k_dim=spec.head_k_dim,
        head_v_dim=spec.head_v_dim,
        conv_kernel=spec.conv_kernel,
        eps=config.rms_norm_eps,
    )
