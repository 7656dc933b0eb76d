"""From an EngineConfig to a running engine: device, dtype, memory, model, arena."""

import logging
import os
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW
from hybridserve.parallel.group import SINGLE, TensorParallelGroup
from hybridserve.parallel.layers.sums import two_parts
from hybridserve.parallel.step_channel.board import Board, agree_on_least
from hybridserve.parallel.step_channel.watch import RankFailure
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import ArenaLayout, plan_arena
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.engine.executor import Executor
from hybridserve.replicas.engine.host_memory import keep_freed_memory
from hybridserve.replicas.engine.local_ranks import LocalProcesses
from hybridserve.replicas.engine.placement import (
    Placement,
    check_tensor_parallel_size,
    rank_backend,
    resolve_placement,
)
from hybridserve.replicas.engine.preparation import Preparation
from hybridserve.replicas.engine.ranks import RankProcesses, Ranks
from hybridserve.replicas.engine.sharded_executor import BLAME_S, ShardedExecutor
from hybridserve.replicas.engine.sizing import Capacity, describe_capacity, plan_capacity
from hybridserve.replicas.engine.startup import StartupReport
from hybridserve.replicas.models.overlap import least_tokens
from hybridserve.replicas.models.registry import build_model, fill_model
from hybridserve.replicas.models.sharding import shard_config
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.runner.runner import GraphLimits, ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage

logger = logging.getLogger(__name__)

CPU_BATCHED_TOKENS = 2048
GPU_BATCHED_TOKENS = 8192
CPU_CACHE_LIMIT = 4 * 2**30
CPU_CACHE_SHARE = 0.25

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""
Wait = Callable[[Callable[[], bool]], None]
"""Returns once what it is given is true, or raises."""


@dataclass(frozen=True)
class Shard:
    """One rank of a model, ready to run plans."""

    runner: ModelRunner
    layout: ArenaLayout
    capacity: Capacity
    max_num_batched_tokens: int


def build_engine(
    config: EngineConfig, progress: Progress | None = None, processes: RankProcesses | None = None
) -> Engine:
    """Load the model, size and cut the arena, and return an engine ready for requests.

    With a `tensor_parallel_size` above 1 this process is rank 0 and starts the others by `processes`, by
    default on this machine; `Engine.shutdown` ends them, as does the engine's end.

    On a GPU the kernels are compiled while weights load, memory is sized by arithmetic and one real step of
    the largest kind, and decode steps are captured as CUDA graphs: no request waits for any of that.

    Raises:
        ValueError: the checkpoint, or an option for this machine, cannot be used; the message says which.
        RankFailure: another rank could not be started; names it and says why.
    """
    report = StartupReport()
    with report.part("config"):
        model_config = config.read_model_config()
        placement = resolve_placement(config, model_config)
        processes = processes or LocalProcesses()
        check_tensor_parallel_size(config, model_config, placement, processes)
    if config.tensor_parallel_size == 1:
        shard = build_shard(config, SINGLE, None, None, progress, report)
        executor: Executor = shard.runner
    else:
        shard, executor = _build_ranks(config, model_config, placement, processes, progress, report)
    _log_capacity(config, shard.capacity, describe_capacity(shard.layout, shard.capacity))
    logger.info(report.describe())
    return Engine(
        model_config,
        Arena(shard.layout, shard.capacity.num_extents),
        executor,
        max_model_len=shard.capacity.max_model_len,
        max_num_seqs=shard.capacity.max_num_seqs,
        max_num_batched_tokens=shard.max_num_batched_tokens,
        seed=config.seed,
        startup_report=report,
    )


def _build_ranks(
    config: EngineConfig,
    model_config: ModelConfig,
    placement: Placement,
    processes: RankProcesses,
    progress: Progress | None,
    report: StartupReport,
) -> tuple[Shard, ShardedExecutor]:
    """All ranks of a replica, this process being rank 0."""
    with report.part("ranks"):
        overlapped = overlapped_bytes(config, model_config, placement)
        ranks = Ranks(config, rank_backend(placement.device), processes, overlapped)
    try:
        shard = build_shard(config, ranks.group, ranks.channel.board, ranks.wait, progress, report)
        with report.part("ranks"):
            ranks.finish_start()
    except BaseException as error:
        if isinstance(error, RuntimeError):
            # it may be another rank's end that is felt here
            ranks.watch.wait_for_failure(BLAME_S)
        # the others wait for this rank, and would not see that they should end
        ranks.stop(0.0)
        if ranks.watch.failure is not None and not isinstance(error, RankFailure):
            raise ranks.watch.failure.again() from error
        raise
    executor = ShardedExecutor(shard.runner, ranks.channel, ranks.watch, ranks.stop, ranks.group.close)
    # also when the interpreter ends; the ranks know nothing of the executor, so it can be collected
    weakref.finalize(executor, ranks.stop)
    return shard, executor


def build_shard(
    config: EngineConfig,
    group: TensorParallelGroup,
    board: Board | None,
    wait: Wait | None,
    progress: Progress | None = None,
    report: StartupReport | None = None,
    device_index: int = 0,
) -> Shard:
    """Load one rank's part of the model and cut its arena; all ranks of a replica call it at once.

    board, wait: by which ranks agree on the arena's size; None for a single rank. device_index: of the GPU,
    among those that this process sees.

    Raises:
        ValueError: as for `build_engine`.
    """
    report = report or StartupReport()
    model_config = config.read_model_config()
    placement = resolve_placement(config, model_config, device_index)
    device = placement.device
    if device.type == "cuda" and group.size > 1:
        torch.cuda.set_device(device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif device.type == "cpu" and group.size > 1:
        # ranks of one machine share its cores
        torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()
    if group.shared_bytes:
        report.memory["shared with ranks"] = group.shared_bytes
    with report.part("model"):
        model = build_model(model_config, group, placement.dtype, device)
    held = shard_config(model_config, group.rank, group.size)
    window = REPLAY_WINDOW if device.type == "cuda" else 0
    layout = plan_arena(held.mixers, placement.dtype.itemsize, config.page_size, window)
    budget = config.max_num_batched_tokens or default_batched_tokens(device)
    preparation = None
    if device.type == "cuda":
        preparation = Preparation(model, held, layout, placement, config, budget, report)
    with report.part("weights"):
        fill_model(model, config.model, config.load_format, config.seed, progress)
    if preparation is not None:
        preparation.finish()
    limits = {
        "model_max_len": model_config.max_position_embeddings,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
    }
    cache_bytes = config.cache_memory_bytes or default_cache_bytes(
        device, config.gpu_memory_utilization, report, group.size
    )
    capacity = plan_capacity(layout, cache_bytes, **limits)
    if group.size > 1:
        tag = zlib.crc32(repr(layout).encode())
        least = agree_on_least(board, capacity.num_extents, tag, wait)
        capacity = plan_capacity(layout, least * layout.extent_bytes, **limits)
    with report.part("arena"):
        storage = ArenaStorage(layout, capacity.num_extents, held.mixers, placement.dtype, device)
    report.memory["arena"] = storage.buffer.numel()
    runner = ModelRunner(model, storage, device, max_num_seqs=capacity.max_num_seqs)
    if device.type == "cuda" and not config.enforce_eager:
        with report.part("graphs"):
            before = torch.cuda.memory_reserved(device)
            graph_limits = GraphLimits(capacity.max_model_len, budget, placement.dtype)
            report.graphs = runner.capture_graphs(graph_limits)
            report.memory["graphs"] = torch.cuda.memory_reserved(device) - before
    return Shard(runner, layout, capacity, budget)


def overlapped_bytes(config: EngineConfig, model_config: ModelConfig, placement: Placement) -> int:
    """Of the longest message that ranks sum while they compute; 0 where they do not."""
    if placement.device.type != "cuda":
        return 0
    tokens = config.max_num_batched_tokens or default_batched_tokens(placement.device)
    if tokens < least_tokens(model_config):
        return 0
    return two_parts(tokens)[0].stop * model_config.hidden_size * placement.dtype.itemsize


def default_batched_tokens(device: torch.device) -> int:
    """Tokens of a step at most: enough to keep the device's matrix units busy."""
    return GPU_BATCHED_TOKENS if device.type == "cuda" else CPU_BATCHED_TOKENS


def default_cache_bytes(
    device: torch.device, gpu_memory_utilization: float, report: StartupReport, tp_size: int = 1
) -> int:
    """Bytes for a shard's arena when `cache_memory_bytes` is not given.

    On a CPU a quarter of the free memory, at most 4 GiB, for all shards together. On a GPU what weights,
    workspace and graphs leave of `gpu_memory_utilization` of the card.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = report.memory["workspace"] + report.memory.get("graphs", 0)
        return int(free - total * (1 - gpu_memory_utilization)) - reserved
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_LIMIT, int(free * CPU_CACHE_SHARE)) // tp_size


def _log_capacity(config: EngineConfig, capacity: Capacity, description: str) -> None:
    if capacity.max_num_seqs == config.max_num_seqs:
        logger.info(description)
        return
    logger.warning(
        "max_num_seqs is clamped from %d to the %d the arena holds: %s",
        config.max_num_seqs,
        capacity.max_num_seqs,
        description,
    )
