"""The program of a rank above 0 in a process of its own: build a shard, then run plans as they come.

Its standard input gives the configuration and ends with the process that started it, as this one then does.
"""

import gc
import json
import logging
import os
import select
import signal
import sys
import traceback

import torch

from hybridserve.parallel.group import connect
from hybridserve.parallel.rendezvous import LOOPBACK, Store, join_store, poll_until
from hybridserve.parallel.step_channel.board import RankState
from hybridserve.parallel.step_channel.channel import StepChannel
from hybridserve.parallel.step_channel.opening import open_channel
from hybridserve.parallel.step_channel.watch import RootWatch
from hybridserve.replicas.engine.build import build_shard, rank_backend, resolve_placement
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.executor import Executor, RunningStep
from hybridserve.replicas.engine.local_ranks import END, failure_key
from hybridserve.replicas.engine.plan_codec import PlanDecoder

logger = logging.getLogger(__name__)

WAIT_S = 0.1
"""Without a plan for so long the last step's end is waited for."""


def main() -> None:
    """Be the rank that standard input says."""
    # Ctrl-C is rank 0's to handle: it goes to every process of the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.stdin.buffer.readline())
    rank, config = told["rank"], EngineConfig(**told["config"])
    store = join_store(LOOPBACK, told["port"])
    watch = RootWatch(lambda: _parent_is_gone(told["parent"]), _leave)
    watch.start()
    code = 0
    try:
        _serve(rank, config, store, watch)
    except Exception as error:
        logger.exception("rank %d failed", rank)
        store.set(failure_key(rank), "".join(traceback.format_exception_only(error)).strip())
        code = 1
    # without the interpreter's own end, which takes long and might wait for a group that is broken
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(rank: int, config: EngineConfig, store: Store, watch: RootWatch) -> None:
    device = resolve_placement(config, config.read_model_config(), rank).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = config.tensor_parallel_size
    channel = open_channel(store, rank, size)
    watch.attach(channel.board)
    channel.board.report(RankState.STARTING)
    group = connect(rank, size, store, backend=rank_backend(device), address=LOOPBACK)
    shard = build_shard(config, group, channel.board, lambda done: poll_until(done, lambda: None))
    # what is there now stays: a collection amid a step would walk over all of it
    gc.collect()
    gc.freeze()
    channel.board.report(RankState.READY)
    run_plans(channel, shard.runner)
    watch.stop()
    channel.close()


def run_plans(channel: StepChannel, runner: Executor) -> None:
    """Run what comes until the end does. As in the engine, a step may begin before the last one has ended."""
    decoder = PlanDecoder()
    running: RunningStep | None = None
    taken = done = 0
    while True:
        # a step is not waited for while the next one could be queued behind it
        message = channel.receive(WAIT_S)
        if message == END:
            break
        submitted = None
        if message is not None:
            taken += 1
            channel.board.count(taken, done)
            submitted = runner.submit(decoder.decode(message))
        if running is not None:
            running.result()
            done += 1
            channel.board.count(taken, done)
        running = submitted


def _parent_is_gone(parent: int) -> bool:
    """Whether the process that started this one has ended, or has closed this one's input."""
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) or os.getppid() != parent


def _leave(reason: str) -> None:
    logger.warning("%s: leaving", reason)
    os._exit(1)
