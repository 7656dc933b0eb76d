"""A load of requests over HTTP: first tokens, tokens, and what keeps to an objective, by bucket of lengths.

    python tests/benchmarks/bench_serve.py --config configs/demo-pools.yaml --rate 3 --num-requests 150
    python tests/benchmarks/bench_serve.py --config configs/demo-pools.yaml --compare --rate 3 --scale 0.25
    python tests/benchmarks/bench_serve.py --url http://host:8000 --tokenizer FOLDER --rate 50 --duration 60

`--config` starts the server on a free port; `--compare` starts it twice, first as it is and then with all
pools in one, and sends both the same load. Arrivals are the trace's own (`--time-scale`), or with `--rate`
independent of each other with lengths drawn from it. The load is open: a request is sent at its time whatever
became of others, and its latencies count from that time. Prompts are token ids, so lengths are exact, and
answers are as long as their `max_tokens`. A first token is the first event with text, and an answer's time
between tokens is its mean. The client's own delays are reported, and it says so when they set the figures.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from serve.client import Measured, Target, drive  # noqa: E402
from serve.servers import started  # noqa: E402
from serve.verdict import ClientReport, client_report  # noqa: E402

from hybridserve.cluster.serve_file import read_settings  # noqa: E402
from hybridserve.cluster.simulation import workload  # noqa: E402
from hybridserve.cluster.simulation.outcomes import Figures, Slo, figures, quantiles  # noqa: E402
from hybridserve.cluster.simulation.tables import (  # noqa: E402
    check_plot,
    draw_figures,
    figures_json,
    figures_table,
    milliseconds,
)
from hybridserve.replicas.text.tokenizer import Tokenizer  # noqa: E402

SAMPLE = Path(__file__).parent / "traces" / "azure_llm_2023_code_sample.csv"


class Prompts:
    """Prompts of exact lengths: random ordinary tokens, so that no two begin alike."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._ids = [one for one in range(tokenizer.vocab_size) if not tokenizer.is_special(one)]
        self._random = random.Random(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=num_tokens)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server that runs")
    where.add_argument("--config", type=Path, help="Serve YAML of a server to start")
    parser.add_argument("--compare", action="store_true", help="with --config: also with all pools in one")
    parser.add_argument("--tokenizer", help="the model's folder; by default the config's")
    parser.add_argument("--model", help="the name to ask for; by default the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="CSV; by default the sample")
    parser.add_argument("--rate", type=float, help="requests a second, instead of the trace's own times")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of the trace's gaps")
    parser.add_argument("--num-requests", type=int, help="by default the trace's, or what --duration has")
    parser.add_argument("--duration", type=float, help="seconds in which requests are sent")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompts' lengths")
    parser.add_argument("--answer-scale", type=float, help="of answers' lengths; by default --scale")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--context", type=int, help="of prompt and answer; by default the config's")
    parser.add_argument("--buckets", type=int, nargs="+", help="their longest; by default the config's")
    parser.add_argument("--priority", default="normal", help="a mix, like high=0.1,normal=0.9")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-itl-ms", type=float, default=100.0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of a whole answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here, and every request's")
    parser.add_argument("--plot", type=Path, help="draw them here")
    return parser


def make_load(args: argparse.Namespace, context: int | None) -> list[workload.Arrival]:
    """The arrivals that the options ask for.

    Raises:
        ValueError: an option or the trace is wrong.
    """
    rng = random.Random(args.seed)
    answer_scale = args.scale if args.answer_scale is None else args.answer_scale
    shape = workload.Shape(args.scale, answer_scale, args.max_tokens, args.context or context)
    rows = [shape.apply(row) for row in workload.read_trace(args.trace)]
    count = args.num_requests
    for name, value in (("--num-requests", count), ("--duration", args.duration)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if args.rate is not None:
        if count is None and args.duration is None:
            raise ValueError("--rate needs --num-requests or --duration")
        # more than a Poisson number reaches but once in a life
        count = count or int(args.rate * args.duration + 10 * (args.rate * args.duration) ** 0.5 + 10)
        arrivals = workload.poisson(rows, count, args.rate, rng)
    else:
        arrivals = workload.at_trace_times(rows, count or len(rows), args.time_scale)
    if args.duration is not None:
        arrivals = [one for one in arrivals if one.at_s < args.duration]
    if not arrivals:
        raise ValueError("the load has no requests")
    return workload.with_priorities(arrivals, workload.parse_priorities(args.priority), rng)


def run(
    args: argparse.Namespace,
    url: str,
    folder: str,
    load: list[workload.Arrival],
    edges: Sequence[int],
    slo: Slo,
) -> tuple[Measured, Figures, ClientReport]:
    """Send the load to one server."""
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    model = args.model or httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"]
    target = Target(url, model, args.api_key, args.timeout)
    # the first call compiles and connects what later ones find ready
    warm = [workload.Arrival(0.1 * at, 16, 4) for at in range(3)]
    asyncio.run(drive(target, warm, Prompts(Tokenizer.load(folder), args.seed + 1)))
    measured = asyncio.run(drive(target, load, Prompts(Tokenizer.load(folder), args.seed)))
    found = figures(measured.outcomes, edges, slo)
    return measured, found, client_report(measured, found)


def run_all(args: argparse.Namespace) -> Iterator[tuple[str, tuple[Measured, Figures, ClientReport]]]:
    """Every run with its name, as it ends."""
    slo = Slo(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3)
    if args.url is not None:
        if args.tokenizer is None:
            raise ValueError("--url needs --tokenizer, the model's folder")
        load = make_load(args, None)
        yield "server", run(args, args.url.rstrip("/"), args.tokenizer, load, args.buckets or (), slo)
        return
    settings = read_settings(args.config)
    edges = args.buckets or [one.max_prompt_tokens for one in settings.pools if one.max_prompt_tokens]
    load = make_load(args, settings.model.max_context_length)
    for name in ("pools", "merged") if args.compare else ("server",):
        with started(args.config, merged=name == "merged") as file:
            folder = args.tokenizer or file.settings.model.tokenizer_path
            yield name, run(args, file.url, folder, load, edges, slo)


def as_json(measured: Measured, found: Figures, client: ClientReport) -> object:
    gaps = quantiles(measured.gaps_s)
    return {
        "figures": figures_json(found),
        "gaps_between_events_s": asdict(gaps),
        "client": client.as_json(),
        "requests": [asdict(one) for one in measured.outcomes],
    }


def main() -> None:
    parser = options()
    args = parser.parse_args()
    try:
        if args.plot:
            check_plot(args.plot)
        if args.compare and args.config is None:
            raise ValueError("--compare needs --config")
        heading, runs = "", {}
        for name, one in run_all(args):
            runs[name] = one
            heading = (
                f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {platform.machine()}, {os.cpu_count()} cores, "
                f"load {os.getloadavg()[0]:.1f}; {' '.join(sys.argv[1:])}"
            )
            if args.json:
                content = {"heading": heading, "runs": {key: as_json(*each) for key, each in runs.items()}}
                args.json.write_text(json.dumps(content, indent=1))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(width=None if Console().is_terminal else 160)
    table = {name: found for name, (_, found, _) in runs.items()}
    console.print(figures_table(table, heading))
    for name, (measured, _, client) in runs.items():
        gaps = milliseconds(quantiles(measured.gaps_s))
        told = f"{name}: gaps between events {gaps} ms; {client.line()}"
        console.print(told, highlight=False, soft_wrap=True)
    if args.plot:
        draw_figures(table, args.plot, heading[:100])


if __name__ == "__main__":
    main()
