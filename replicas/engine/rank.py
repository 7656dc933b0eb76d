"""A rank above 0, in whatever process it was started: build a shard, then run plans as they come."""

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable

import torch

from hybridserve.parallel.group import connect
from hybridserve.parallel.rendezvous import Store, join_store, poll_until
from hybridserve.parallel.step_channel.board import RankState
from hybridserve.parallel.step_channel.channel import StepChannel
from hybridserve.parallel.step_channel.opening import open_channel
from hybridserve.parallel.step_channel.watch import RootWatch
from hybridserve.replicas.engine.build import build_shard, overlapped_bytes
from hybridserve.replicas.engine.executor import Executor, RunningStep
from hybridserve.replicas.engine.placement import rank_backend, resolve_placement
from hybridserve.replicas.engine.plan_codec import PlanDecoder
from hybridserve.replicas.engine.ranks import END, RankStart, failure_key

logger = logging.getLogger(__name__)

WAIT_S = 0.1
"""Without a plan for so long the last step's end is waited for."""


def run_rank(
    start: RankStart,
    address: str,
    root_is_gone: Callable[[], bool],
    leave: Callable[[str], None],
    longest_silence_s: float | None = None,
) -> str | None:
    """Be that rank until rank 0 ends it, which gives None, or it fails, which gives the reason.

    address: of this machine, by which other ranks reach it. root_is_gone, longest_silence_s: see `RootWatch`.
    leave: called with a reason, on a thread of its own, when rank 0 is gone; must end the process.
    """
    store = join_store(start.address, start.port)
    watch = RootWatch(root_is_gone, leave, longest_silence_s)
    watch.start()
    try:
        _serve(start, address, store, watch)
    except Exception as error:
        logger.exception("rank %d failed", start.rank)
        reason = "".join(traceback.format_exception_only(error)).strip()
        # with rank 0 its store is gone, and nobody is left to be told
        with contextlib.suppress(RuntimeError):
            store.set(failure_key(start.rank), reason)
        return reason
    return None


def _serve(start: RankStart, address: str, store: Store, watch: RootWatch) -> None:
    config, rank, size = start.config, start.rank, start.config.tensor_parallel_size
    model_config = config.read_model_config()
    placement = resolve_placement(config, model_config, start.device_index)
    device = placement.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    channel = open_channel(store, rank, size, address=address)
    watch.attach(channel.board)
    channel.board.report(RankState.STARTING)
    group = connect(
        rank,
        size,
        store,
        backend=rank_backend(device),
        address=address,
        overlapped_bytes=overlapped_bytes(config, model_config, placement),
    )
    shard = build_shard(
        config,
        group,
        channel.board,
        lambda done: poll_until(done, lambda: None),
        device_index=start.device_index,
    )
    # what is there now stays: a collection amid a step would walk over all of it
    gc.collect()
    gc.freeze()
    channel.board.report(RankState.READY)
    run_plans(channel, shard.runner)
    # a process that ends takes its part of what still runs with it, and rank 0 would wait for that
    shard.runner.shutdown()
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
