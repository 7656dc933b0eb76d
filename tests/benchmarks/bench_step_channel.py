"""How long a step's plan takes from rank 0 to all other ranks.

    python tests/benchmarks/bench_step_channel.py [--ranks 2 4] [--sequences 1 256] [--steps 1000] [--group]

Every rank is a process. Rank 0 sends a decode step's plan every few milliseconds, as an engine does, and the
others sleep until it comes. Printed for each step is the slowest rank's time, by the clock that a host's
processes share: the bytes' way alone, and that with the plan's encoding and decoding.
"""

import argparse
import gc
import os
import struct
import subprocess
import sys
import time

import torch

from hybridserve.parallel.rendezvous import LOOPBACK, host_store, join_store, wait_for_keys
from hybridserve.parallel.step_channel import opening
from hybridserve.replicas.engine.plan import SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.engine.plan_codec import PlanDecoder, PlanEncoder
from hybridserve.replicas.sampling_params import SamplingParams

CONTEXT = 8192
PAUSE_S = 0.004
WARM_UP = 50
STAMP = struct.Struct("<qq")


def plans(num_sequences: int, num_steps: int):
    """Decode steps of sequences of 8K tokens, whose tables grow."""
    params = SamplingParams(temperature=0.7)
    tables = [list(range(at * 512, (at + 1) * 512)) for at in range(num_sequences)]
    for step in range(num_steps):
        if step % 16 == 0:
            for at, table in enumerate(tables):
                table.append(step + at)
        yield StepPlan(
            step,
            tuple(
                ScheduledSequence(
                    f"request {at}",
                    [-1],
                    CONTEXT + step,
                    at,
                    table,
                    SampleSpec(params, at, CONTEXT + step + 1, CONTEXT, (), ()),
                    step,
                    at,
                )
                for at, table in enumerate(tables)
            ),
            num_sequences,
        )


def send(store, args, num_ranks: int, num_sequences: int) -> None:
    channel = opening.open_channel(store, 0, num_ranks)
    encoder = PlanEncoder()
    encoding, size = [], 0
    for plan in plans(num_sequences, args.steps + WARM_UP):
        time.sleep(PAUSE_S)
        began = time.perf_counter_ns()
        channel.announce()
        message = encoder.encode(plan)
        sent = time.perf_counter_ns()
        channel.send(STAMP.pack(began, sent) + message)
        encoding.append(sent - began)
        size = len(message)
    keys = [f"times/{rank}" for rank in range(1, num_ranks)]
    found = [
        torch.frombuffer(bytearray(v), dtype=torch.int64) for v in wait_for_keys(store, keys, lambda: None)
    ]
    whole, way = torch.stack(found).view(len(found), 2, -1).amax(0)[:, WARM_UP:] / 1e3
    share = torch.tensor([0.5, 0.9, 0.99])
    columns = [*way.quantile(share.to(way.dtype)).tolist(), *whole.quantile(share.to(way.dtype)).tolist()]
    print(
        f"{type(channel).__name__:14} {num_ranks:5} {num_sequences:9} {size:7}  "
        + " ".join(f"{value:8.1f}" for value in columns),
        flush=True,
    )


def receive(store, args, rank: int, num_ranks: int) -> None:
    channel = opening.open_channel(store, rank, num_ranks)
    # as a rank does
    gc.collect()
    gc.freeze()
    decoder = PlanDecoder()
    whole, way = [], []
    while len(way) < args.steps + WARM_UP:
        message = channel.receive(10.0)
        arrived = time.perf_counter_ns()
        began, sent = STAMP.unpack_from(message)
        decoder.decode(message[STAMP.size :])
        way.append(arrived - sent)
        whole.append(time.perf_counter_ns() - began)
    store.set(f"times/{rank}", torch.tensor([whole, way]).numpy().tobytes())
    # a thread of the group channel cannot be ended
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--group", action="store_true", help="as between hosts: a CPU process group")
    parser.add_argument("--join", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.group:
        opening.host_identity = lambda: ""
    if args.join:
        port, rank, num_ranks = args.join
        receive(join_store(LOOPBACK, port), args, rank, num_ranks)
        return
    print(f"{os.cpu_count()} cores, {args.steps} steps, µs")
    print(
        f"{'channel':14} {'ranks':>5} {'sequences':>9} {'bytes':>7}  {'way p50':>8} {'p90':>8} {'p99':>8} "
        f"{'+codec':>8} {'p90':>8} {'p99':>8}"
    )
    for num_ranks in args.ranks:
        for num_sequences in args.sequences:
            store = host_store()
            command = [sys.executable, __file__, "--steps", str(args.steps), *(["--group"] * args.group)]
            others = [
                subprocess.Popen([*command, "--join", str(store.port), str(rank), str(num_ranks)])
                for rank in range(1, num_ranks)
            ]
            try:
                send(store, args, num_ranks, num_sequences)
            finally:
                for other in others:
                    other.kill()
                    other.wait()


if __name__ == "__main__":
    main()
