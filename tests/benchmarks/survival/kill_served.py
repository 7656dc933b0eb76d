"""What a killed shard or engine costs a server under load: whose requests fail, and when it is whole again.

    python tests/benchmarks/survival/kill_served.py --config tests/benchmarks/serve/h200x2-9b.yaml \\
        --rate 20 --duration 60 --kill-at 15 [--kill engine] [--json out.json]

Options are bench_serve.py's and these two: a server is started from the configuration, the load is sent, and
meanwhile one process gets SIGKILL. Printed are the load's figures and a line of JSON: `in_flight` requests
when it was killed, and how many of them failed; `told_after_s`, until the last of those was told;
`longest_silence_s` between two tokens of an answer that ended well; `whole_after_s`, until there are as many
such processes as before and a request that was sent after the kill has been answered (with several replicas
another one may have answered it).
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks")]

from bench_serve import Prompts, make_load, options  # noqa: E402
from serve.client import Measured, Target, drive  # noqa: E402
from serve.servers import started  # noqa: E402
from serve.verdict import client_report  # noqa: E402

from hybridserve.cluster.cli.serve import ServeFile  # noqa: E402
from hybridserve.cluster.serve_file import read_settings  # noqa: E402
from hybridserve.cluster.simulation.outcomes import OK, Slo, figures  # noqa: E402
from hybridserve.cluster.simulation.tables import figures_json, figures_table  # noqa: E402
from hybridserve.cluster.simulation.workload import Arrival  # noqa: E402
from hybridserve.replicas.text.tokenizer import Tokenizer  # noqa: E402
from tests.cluster.survival.application import processes  # noqa: E402

TITLES = {"shard": "ray::ShardActor", "engine": "ray::EngineActor"}
PROBE_S = 0.2
LONGEST_S = 300.0
"""Until the server has to be whole again."""


async def kill_one(what: str, at_s: float, url: str, model: str) -> dict[str, Any]:
    """Kill a process `at_s` from now and wait until there is another one, and an answer.

    Raises:
        RuntimeError: there is none to kill, or the server is not whole again in time.
    """
    await asyncio.sleep(at_s)
    before = processes(TITLES[what])
    if not before:
        raise RuntimeError(f"no process of this server is called {TITLES[what]}")
    victim = before[0]
    victim.kill()
    killed = time.perf_counter()
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}
    failures: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < killed + LONGEST_S:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                status = response.status
            now = processes(TITLES[what])
            if status == 200 and len(now) >= len(before) and victim.pid not in [one.pid for one in now]:
                whole = time.perf_counter() - killed
                return {
                    "killed": what,
                    "pid": victim.pid,
                    "at": killed,
                    "whole_after_s": whole,
                    "failed_probes": dict(failures),
                }
            if status != 200:
                failures[str(status)] += 1
            await asyncio.sleep(PROBE_S)
    raise RuntimeError(f"the server was not whole {LONGEST_S:g} s after {what} {victim.pid} was killed")


async def load_and_kill(
    args: argparse.Namespace, target: Target, load: list[Arrival], prompts: Prompts
) -> tuple[Measured, dict[str, Any]]:
    """Both at once; the kill's time counts from the load's beginning."""
    # begins with making all prompts, before the other task can run
    sending = asyncio.create_task(drive(target, load, prompts))
    killing = asyncio.create_task(kill_one(args.kill, args.kill_at, target.url, target.model))
    try:
        return await sending, await killing
    finally:
        killing.cancel()


def cost_of(measured: Measured, kill: dict[str, Any]) -> dict[str, Any]:
    """What the kill did to the load's requests."""
    at = kill.pop("at") - measured.began
    in_flight = [one for one in measured.outcomes if one.at_s <= at < one.at_s + one.end_s]
    failed = [one for one in in_flight if one.end != OK]
    later = [one for one in measured.outcomes if one.at_s > at]
    return {
        **kill,
        "after_s": at,
        "requests": len(measured.outcomes),
        "failed": dict(Counter(one.end for one in measured.outcomes if one.end != OK)),
        "in_flight": len(in_flight),
        "in_flight_failed": len(failed),
        "told_after_s": max((one.at_s + one.end_s - at for one in failed), default=None),
        "sent_later": len(later),
        "sent_later_failed": sum(one.end != OK for one in later),
        "longest_silence_s": max(measured.gaps_s, default=None),
    }


def run(args: argparse.Namespace, file: ServeFile, load: list[Arrival]) -> tuple[Measured, dict[str, Any]]:
    folder = args.tokenizer or file.settings.model.tokenizer_path
    target = Target(file.url, args.model or file.settings.model.served_name, args.api_key, args.timeout)
    tokenizer = Tokenizer.load(folder)
    # the first call compiles and connects what later ones find ready
    warm = [Arrival(0.1 * at, 16, 4) for at in range(3)]
    asyncio.run(drive(target, warm, Prompts(tokenizer, args.seed + 1)))
    measured, kill = asyncio.run(load_and_kill(args, target, load, Prompts(tokenizer, args.seed)))
    return measured, cost_of(measured, kill)


def main() -> None:
    parser = options()
    parser.description = __doc__
    parser.add_argument("--kill", choices=tuple(TITLES), default="shard")
    parser.add_argument("--kill-at", type=float, default=10.0, help="seconds after the load has begun")
    args = parser.parse_args()
    try:
        if args.config is None:
            raise ValueError("--config is needed: only the processes of a server started here can be killed")
        settings = read_settings(args.config)
        load = make_load(args, settings.model.max_context_length)
        with started(args.config) as file:
            measured, cost = run(args, file, load)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    edges = args.buckets or [one.max_prompt_tokens for one in settings.pools if one.max_prompt_tokens]
    found = figures(measured.outcomes, edges, Slo(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3))
    if args.json:
        requests = [asdict(one) for one in measured.outcomes]
        content = {"kill": cost, "figures": figures_json(found), "requests": requests}
        args.json.write_text(json.dumps(content, indent=1))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(figures_table({"server": found}, " ".join(sys.argv[1:])))
    console.print(client_report(measured, found).line(), highlight=False, soft_wrap=True)
    console.print(json.dumps(cost), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
