"""From an EngineConfig to a running engine: device, dtype, memory, model, arena."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.parallel.group import SINGLE
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.engine.host_memory import keep_freed_memory
from hybridserve.replicas.engine.sizing import Capacity, describe_capacity, plan_capacity
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.registry import load_model
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.runner.runner import ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage

logger = logging.getLogger(__name__)

CPU_CACHE_LIMIT = 4 * 2**30
CPU_CACHE_SHARE = 0.25

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""


@dataclass(frozen=True)
class Placement:
    """Where and in what the model runs."""

    device: torch.device
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model, size and cut the arena, and return an engine ready for requests.

    Raises:
        ValueError: the checkpoint, or an option for this machine, cannot be used; the message says which.
    """
    if config.tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but only 1 is supported yet"
        )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model_config = load_model_config(config.model, config.hf_overrides)
    placement = resolve_placement(config, model_config)
    if placement.device.type == "cpu":
        keep_freed_memory()
    model = load_model(
        config.model,
        model_config,
        SINGLE,
        placement.dtype,
        placement.device,
        config.load_format,
        config.seed,
        progress,
    )
    layout = plan_arena(model_config.mixers, placement.dtype.itemsize, config.page_size)
    capacity = plan_capacity(
        layout,
        config.cache_memory_bytes or default_cache_bytes(placement.device, config.gpu_memory_utilization),
        model_max_len=model_config.max_position_embeddings,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    _log_capacity(config, capacity, describe_capacity(layout, capacity))
    storage = ArenaStorage(
        layout, capacity.num_extents, model_config.mixers, placement.dtype, placement.device
    )
    return Engine(
        model_config,
        Arena(layout, capacity.num_extents),
        ModelRunner(model, storage, placement.device, max_num_seqs=capacity.max_num_seqs),
        max_model_len=capacity.max_model_len,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seed=config.seed,
    )


def resolve_placement(config: EngineConfig, model_config: ModelConfig) -> Placement:
    """Settle "auto": a GPU if there is one; the checkpoint's dtype on a GPU, float32 on a CPU."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch sees no CUDA device")
    device = torch.device("cuda" if available and config.device != "cpu" else "cpu")
    dtype = config.dtype
    if dtype == "auto":
        dtype = model_config.dtype if device.type == "cuda" else "float32"
    return Placement(device, dtype)


def default_cache_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes for the arena when `cache_memory_bytes` is not given.

    On a CPU a quarter of the free memory, at most 4 GiB. On a GPU what the weights leave of
    `gpu_memory_utilization` of the card.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - gpu_memory_utilization))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_LIMIT, int(free * CPU_CACHE_SHARE))


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
