"""Measure an engine's steps as points of a step curve for `hybridserve simulate`, without HTTP or Ray.

    python tests/benchmarks/bench_curve.py --config configs/demo-pools.yaml --engines 2 --out curve.yaml

Builds the engine of the config's first pool by the server's own factory, `--engines` of them at once in
processes of their own, as the pools of one machine share its cores. Decode steps are medians over a batch
that only decodes; a first token's time is the median of a prompt alone. With `--quartile` it is lower
quartiles instead: where other work comes and goes, a median is that work's.
"""

import argparse
import datetime
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import yaml

from hybridserve.cluster.pool.engine_factory import CheckpointEngine
from hybridserve.cluster.serve_file import read_settings
from hybridserve.cluster.simulation.outcomes import quantile
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.sampling_params import SamplingParams

CONTEXT = 256
STEPS = 40
Point = dict[int, float]


def measure(
    config: EngineConfig, rows: list[int], prompts: list[int], rounds: int, share: float
) -> tuple[Point, Point]:
    """(ms of a step by rows, ms to the first token by the prompt's length)."""
    engine = CheckpointEngine(config)().engine
    rng = random.Random(0)
    vocabulary = range(16, engine.model_config.vocab_size)

    def run(lengths: list[int], max_tokens: int) -> tuple[float, list[float]]:
        """Seconds to the first tokens, and of every step after all prompts were computed."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for index, length in enumerate(lengths):
            engine.add_request(str(index), rng.choices(vocabulary, k=length), params)
        began = time.perf_counter()
        started: set[str] = set()
        while len(started) < len(lengths):
            started |= {output.request_id for output in engine.step() if output.token_ids}
        first = time.perf_counter() - began
        steps = []
        while engine.has_unfinished():
            at = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - at)
        return first, steps

    run([64] * 2, 8)
    decode, first_token = {}, {}
    for count in rows:
        # the prompts' share of the steps ends at different times: the last ones have all rows
        lengths = [CONTEXT - STEPS // 2] * count
        steps = [step for _ in range(rounds) for step in run(lengths, STEPS)[1][:-8]]
        decode[count] = 1e3 * quantile(sorted(steps), share)
    for length in prompts:
        times = [run([length], 1)[0] for _ in range(3 * rounds)]
        first_token[length] = 1e3 * quantile(sorted(times), share)
    return decode, first_token


def worker(
    config: EngineConfig,
    rows: list[int],
    prompts: list[int],
    rounds: int,
    share: float,
    barrier: Barrier,
    results: "multiprocessing.Queue[tuple[Point, Point]]",
) -> None:
    barrier.wait()
    results.put(measure(config, rows, prompts, rounds, share))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/demo-pools.yaml"))
    parser.add_argument("--engines", type=int, default=1, help="at once")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 128, 256, 512, 1024, 1536, 2040])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quartile", action="store_true", help="the lower ones, not medians")
    parser.add_argument("--out", type=Path, help="write the curve's file here")
    args = parser.parse_args()
    settings = read_settings(args.config)
    config = settings.engine_config("cpu")
    context = multiprocessing.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(args.engines)
    processes = [
        context.Process(
            target=worker,
            args=(
                config,
                args.rows,
                args.prompts,
                args.rounds,
                0.25 if args.quartile else 0.5,
                barrier,
                results,
            ),
        )
        for _ in range(args.engines)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    decode, first_token = (
        {size: round(statistics.fmean(each[part][size] for each in found), 3) for size in found[0][part]}
        for part in (0, 1)
    )
    content = {
        "name": f"{settings.model.served_name}, {args.engines} engines at once, {os.cpu_count()} cores",
        "source": f"python {' '.join(sys.argv)}, {datetime.date.today()}, load {os.getloadavg()[0]:.1f}",
        "max_num_batched_tokens": settings.serving_of(settings.pool_specs()[0].name).max_num_batched_tokens
        or 2048,
        "decode": {"context": CONTEXT, "step_ms": decode},
        "first_token_ms": first_token,
    }
    text = yaml.safe_dump(content, sort_keys=False)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
