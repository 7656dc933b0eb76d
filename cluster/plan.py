"""What a configuration will take of a cluster, by arithmetic: bundles, GPUs, and what fits in the memory.

Reads the model's `config.json` alone; no Ray, no torch, no weights.
"""

from dataclasses import dataclass
from typing import Literal

from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.serve_alpha.placement import Placement, plan_placement
from hybridserve.cluster.settings import AppSettings
from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.engine.sizing import longest_sequence, sequences_that_fit
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.footprint import Footprint, measure_footprint
from hybridserve.replicas.models.sharding import check_tp_size, with_splits, with_state_dtype
from hybridserve.replicas.models.specs import ModelConfig


@dataclass(frozen=True)
class MemoryFit:
    """One shard's memory, in bytes; the workspace of a step comes on top of the weights."""

    weight_bytes: int
    arena_bytes: int
    """Negative: what is missing for the weights."""
    longest: int
    """Tokens of the longest sequence that the arena holds by itself, whatever the context is."""
    context: int
    """Tokens that a sequence may have: the model's, or `max_context_length`."""
    sequences: tuple[tuple[int, int], ...]
    """(tokens, how many sequences of that length fit at once)."""
    layout: ArenaLayout


@dataclass(frozen=True)
class PoolPlan:
    """One pool."""

    spec: PoolSpec
    placement: Placement
    fit: MemoryFit | None
    """None when the arena's size depends on a machine that is not known."""

    @property
    def gpus(self) -> tuple[float, float]:
        """Of all its replicas, at least and at most."""
        return self.spec.replicas.min * self.placement.gpus, self.spec.replicas.max * self.placement.gpus


def plan_pools(
    settings: AppSettings, config: ModelConfig, device: Literal["cpu", "cuda"], gpu_bytes: int | None
) -> list[PoolPlan]:
    """Every pool's placement and memory.

    config: of the model. gpu_bytes: of one GPU, for pools that do not say `cache_memory`.

    Raises:
        ValueError: a pool's tensor-parallel size does not divide the model; the message names both.
    """
    plans = []
    for spec in settings.pool_specs():
        footprint = _footprint(settings, spec, config, device)
        placement = plan_placement(spec.tensor_parallel_size, device)
        plans.append(PoolPlan(spec, placement, _fit(settings, spec, footprint, config, device, gpu_bytes)))
    return plans


def check_shards(settings: AppSettings) -> None:
    """Raise ValueError when a pool's tensor-parallel size does not divide the model."""
    if all(spec.tensor_parallel_size == 1 for spec in settings.pool_specs()):
        return
    config = load_model_config(settings.model.path)
    for spec in settings.pool_specs():
        _footprint(settings, spec, config, "cuda")


def _footprint(
    settings: AppSettings, spec: PoolSpec, config: ModelConfig, device: Literal["cpu", "cuda"]
) -> Footprint:
    dtype = settings.model.precision
    if dtype == "auto":
        dtype = config.dtype if device == "cuda" else "float32"
    page_size = settings.serving_of(spec.name).page_size
    parallel = settings.parallel
    config = with_splits(config, parallel.linear_attention_split, parallel.moe_split)
    config = with_state_dtype(config, settings.model.state_precision)
    try:
        check_tp_size(config, spec.tensor_parallel_size)
        return measure_footprint(config, dtype, page_size=page_size, tp_size=spec.tensor_parallel_size)
    except ValueError as error:
        raise ValueError(
            f"pool {spec.name}: tensor_parallel_size {spec.tensor_parallel_size} does not divide the model: "
            f"{error}"
        ) from None


def _fit(
    settings: AppSettings,
    spec: PoolSpec,
    footprint: Footprint,
    config: ModelConfig,
    device: Literal["cpu", "cuda"],
    gpu_bytes: int | None,
) -> MemoryFit | None:
    serving = settings.serving_of(spec.name)
    arena_bytes = serving.cache_memory
    if arena_bytes is None:
        if device == "cpu" or gpu_bytes is None:
            return None
        arena_bytes = int(gpu_bytes * serving.gpu_memory_utilization) - footprint.weight_bytes
    layout = footprint.layout
    num_extents = max(0, arena_bytes) // layout.extent_bytes
    context = settings.model.max_context_length or config.max_position_embeddings
    lengths = sorted({min(spec.max_prompt_tokens or context, context), context})
    return MemoryFit(
        weight_bytes=footprint.weight_bytes,
        arena_bytes=arena_bytes,
        longest=longest_sequence(layout, num_extents),
        context=context,
        sequences=tuple((length, sequences_that_fit(layout, num_extents, length)) for length in lengths),
        layout=layout,
    )
