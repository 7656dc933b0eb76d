"""`hybridserve plan CONFIG`: what a configuration takes of a cluster, before anything is started.

Owns the tables. Starts no Ray, reads no weights, imports no torch.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybridserve.cluster.plan import MemoryFit, PoolPlan, plan_pools
from hybridserve.cluster.serve_file import read_settings
from hybridserve.cluster.sizes import format_size, parse_size
from hybridserve.replicas.models.config import load_model_config

_DEFAULT_GPU = "80GiB"


def plan(
    config: Annotated[Path, typer.Argument(help="Serve YAML, like configs/demo-pools.yaml.")],
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or shape file to reckon with; by default the YAML's model."),
    ] = None,
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of one GPU, such as 80GiB or 141GB.")
    ] = _DEFAULT_GPU,
) -> None:
    """Show a configuration's pools, their placement, and what fits in memory; start nothing."""
    print_plan(config, model, gpu_memory)


def print_plan(config: Path, model: str | None = None, gpu_memory: str = _DEFAULT_GPU) -> None:
    """The tables of `plan`.

    Raises:
        ValueError: the configuration, the model or the size is wrong; the message says what.
        OSError: the file cannot be read.
    """
    gpu_bytes = parse_size("gpu_memory", gpu_memory)
    settings = read_settings(config)
    shape = load_model_config(model or settings.model.path)
    wants_gpus = any(spec.tensor_parallel_size > 1 for spec in settings.pool_specs())
    device = settings.serving.device
    if device == "auto":
        device = "cuda" if wants_gpus else "cpu"
    plans = plan_pools(settings, shape, device, gpu_bytes)
    # a table that is cut to a terminal's width hides figures; a pipe has no width
    console = Console(width=None if Console().is_terminal else 160)
    console.print(f"{settings.model.served_name}: {shape.model_type}, {shape.num_layers} layers, on {device}")
    console.print(_pool_table(plans))
    of_gpu = gpu_bytes if device == "cuda" else None
    console.print(_memory_table(plans, of_gpu, settings.model.max_context_length))
    console.print(_sum(plans, settings.autoscaling.max_gpus))


def _pool_table(plans: list[PoolPlan]) -> Table:
    table = Table(title="pools", title_justify="left")
    for column in ("pool", "prompt tokens", "replicas", "TP", "bundles of a replica", "GPUs", "borrows"):
        table.add_column(column)
    for one in plans:
        spec = one.spec
        table.add_row(
            spec.name,
            spec.bucket,
            _range(spec.replicas.min, spec.replicas.max),
            str(spec.tensor_parallel_size),
            f"{' + '.join(map(_bundle, one.placement.bundles))}, {one.placement.strategy}",
            _range(*one.gpus),
            ", ".join(spec.borrows) or "-",
        )
    return table


def _bundle(bundle: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} {amount:g}" for name, amount in bundle.items()) + "}"


def _memory_table(plans: list[PoolPlan], gpu_bytes: int | None, max_context_length: int | None) -> Table:
    of = "" if gpu_bytes is None else f" of {format_size(gpu_bytes)}"
    table = Table(title=f"memory of one shard{of}, before workspace", title_justify="left")
    for column in ("pool", "weights", "arena", "longest sequence", "sequences at once", "token budget"):
        table.add_column(column)
    for one in plans:
        budget = f"{one.spec.limits.token_budget:,} a replica"
        fit = one.fit
        if fit is None:
            table.add_row(one.spec.name, "", "as found", "", "", budget)
        elif fit.arena_bytes < 0:
            missing = f"missing {format_size(-fit.arena_bytes)}"
            table.add_row(one.spec.name, format_size(fit.weight_bytes), missing, "none", "none", budget)
        else:
            many = ", ".join(f"{count:,} of {length:,}" for length, count in fit.sequences)
            table.add_row(
                one.spec.name,
                format_size(fit.weight_bytes),
                format_size(fit.arena_bytes),
                _longest(fit, max_context_length),
                many,
                budget,
            )
    return table


def _longest(fit: MemoryFit, asked: int | None) -> str:
    """Of context and arena the smaller one, and which it is. asked: `max_context_length`."""
    by = "arena" if fit.longest < fit.context else "context"
    # an engine refuses a context that it was asked for and has no memory for
    missed = " (too few for max_context_length)" if asked is not None and fit.longest < asked else ""
    return f"{min(fit.longest, fit.context):,} tokens, by the {by}{missed}"


def _sum(plans: list[PoolPlan], max_gpus: int | None) -> str:
    replicas = (sum(one.spec.replicas.min for one in plans), sum(one.spec.replicas.max for one in plans))
    gpus = tuple(sum(one.gpus[end] for one in plans) for end in (0, 1))
    cap = f", never more than max_gpus {max_gpus}" if max_gpus is not None and max_gpus < gpus[1] else ""
    return f"in sum: replicas {_range(*replicas)}, GPUs {_range(*gpus)}{cap}"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
