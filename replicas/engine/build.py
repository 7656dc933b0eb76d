"""From an EngineConfig to a running engine: device, dtype, memory, model, arena."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridserve.kernels.linear_attention.replay import REPLAY_WINDOW
from hybridserve.parallel.group import SINGLE
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import ArenaLayout, plan_arena
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.engine.host_memory import keep_freed_memory
from hybridserve.replicas.engine.sizing import Capacity, describe_capacity, plan_capacity
from hybridserve.replicas.engine.startup import StartupReport
from hybridserve.replicas.models.registry import build_model, fill_model
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.runner.runner import GraphLimits, Model, ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage

logger = logging.getLogger(__name__)

CPU_BATCHED_TOKENS = 2048
GPU_BATCHED_TOKENS = 8192
LOGIT_BYTES = 4
GRAPH_RESERVE = 768 * 2**20
"""For what graphs hold beside logits: a decode step's intermediates, cuBLAS' workspaces."""
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

    On a GPU the kernels are compiled while weights load, memory is sized by arithmetic and one real step of
    the largest kind, and decode steps are captured as CUDA graphs: no request waits for any of that.

    Raises:
        ValueError: the checkpoint, or an option for this machine, cannot be used; the message says which.
    """
    if config.tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but only 1 is supported yet"
        )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    report = StartupReport()
    with report.part("config"):
        model_config = config.read_model_config()
        placement = resolve_placement(config, model_config)
    device = placement.device
    if device.type == "cpu":
        keep_freed_memory()
    with report.part("model"):
        model = build_model(model_config, SINGLE, placement.dtype, device)
    window = REPLAY_WINDOW if device.type == "cuda" else 0
    layout = plan_arena(model_config.mixers, placement.dtype.itemsize, config.page_size, window)
    budget = config.max_num_batched_tokens or default_batched_tokens(device)
    preparation = None
    if device.type == "cuda":
        preparation = Preparation(model, model_config, layout, placement, config, budget, report)
    with report.part("weights"):
        fill_model(model, config.model, config.load_format, config.seed, progress)
    if preparation is not None:
        preparation.finish()
    capacity = plan_capacity(
        layout,
        config.cache_memory_bytes or default_cache_bytes(device, config.gpu_memory_utilization, report),
        model_max_len=model_config.max_position_embeddings,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    with report.part("arena"):
        storage = ArenaStorage(layout, capacity.num_extents, model_config.mixers, placement.dtype, device)
    report.memory["arena"] = storage.buffer.numel()
    runner = ModelRunner(model, storage, device, max_num_seqs=capacity.max_num_seqs)
    if device.type == "cuda" and not config.enforce_eager:
        with report.part("graphs"):
            before = torch.cuda.memory_reserved(device)
            limits = GraphLimits(capacity.max_model_len, budget, placement.dtype)
            report.graphs = runner.capture_graphs(limits)
            report.memory["graphs"] = torch.cuda.memory_reserved(device) - before
    _log_capacity(config, capacity, describe_capacity(layout, capacity))
    logger.info(report.describe())
    return Engine(
        model_config,
        Arena(layout, capacity.num_extents),
        runner,
        max_model_len=capacity.max_model_len,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=budget,
        seed=config.seed,
        startup_report=report,
    )


class Preparation:
    """What a GPU needs before its arena is cut, begun before the weights are there."""

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        layout: ArenaLayout,
        placement: Placement,
        config: EngineConfig,
        budget: int,
        report: StartupReport,
    ) -> None:
        """Look for the kernels and start to compile them."""
        # both import Triton, which a CPU's engine can do without
        from hybridserve.kernels.compilation import Compilation
        from hybridserve.replicas.runner.rehearsal import Rehearsal

        self._device = placement.device
        self._report = report
        self._logits_bytes = config.max_num_seqs * model_config.vocab_size * LOGIT_BYTES
        self._graphs = not config.enforce_eager
        report.memory["weights"] = torch.cuda.memory_allocated(self._device)
        with report.part("rehearsal"):
            # weights are not there yet, but their tensors are
            model.finish_loading()
            self._rehearsal = Rehearsal(
                model,
                model_config,
                layout,
                placement.dtype,
                placement.device,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=config.max_model_len or model_config.max_position_embeddings,
            )
            self._compilation = Compilation(self._rehearsal.launches(), os.cpu_count() or 1)
        report.compiled_kernels = self._compilation.num_kernels

    def finish(self) -> None:
        """Wait for the kernels; run the largest steps and note what memory they take beside weights."""
        with self._report.part("kernels"):
            self._compilation.wait()
        with self._report.part("profile"):
            held = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._rehearsal.run()
            torch.cuda.synchronize(self._device)
            used = torch.cuda.max_memory_allocated(self._device) - held
            del self._rehearsal
            torch.cuda.empty_cache()
        # logits of all sequences at once, and a copy while they are edited, are in no step that was run
        self._report.memory["workspace"] = used + 2 * self._logits_bytes
        if self._graphs:
            self._report.memory["graphs"] = self._logits_bytes + GRAPH_RESERVE


def default_batched_tokens(device: torch.device) -> int:
    """Tokens of a step at most: enough to keep the device's matrix units busy."""
    return GPU_BATCHED_TOKENS if device.type == "cuda" else CPU_BATCHED_TOKENS


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


def default_cache_bytes(device: torch.device, gpu_memory_utilization: float, report: StartupReport) -> int:
    """Bytes for the arena when `cache_memory_bytes` is not given.

    On a CPU a quarter of the free memory, at most 4 GiB. On a GPU what weights, workspace and graphs leave of
    `gpu_memory_utilization` of the card.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = report.memory["workspace"] + report.memory.get("graphs", 0)
        return int(free - total * (1 - gpu_memory_utilization)) - reserved
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
