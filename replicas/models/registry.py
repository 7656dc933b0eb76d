"""From a model's config to a model with weights: which class a model type is, and how it is filled."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.weights.loader import Progress, checkpoint_targets, load_checkpoint, load_dummy
from hybridserve.replicas.models.config import check_load_format
from hybridserve.replicas.models.qwen3_5 import Qwen3_5ForCausalLM
from hybridserve.replicas.models.sharding import check_tp_size
from hybridserve.replicas.models.specs import DTYPE_BYTES, ModelConfig

logger = logging.getLogger(__name__)

BUILDERS: dict[str, Callable[..., Qwen3_5ForCausalLM]] = {
    "qwen3_5_text": Qwen3_5ForCausalLM,
    "qwen3_5_moe_text": Qwen3_5ForCausalLM,
    "qwen3_next": Qwen3_5ForCausalLM,
}

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def build_model(
    config: ModelConfig, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
) -> Qwen3_5ForCausalLM:
    """One shard of the model, its weights not filled yet.

    Raises:
        ValueError: the group's size does not divide what has to be cut; names numbers and sizes that work.
    """
    check_tp_size(config, group.size)
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return BUILDERS[config.model_type](config, group, dtype=dtype, device=device)


def load_model(
    path: str | Path,
    config: ModelConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Qwen3_5ForCausalLM:
    """One shard of the model, ready to run.

    `load_format` "auto" reads the safetensors in `path`; "dummy" draws random weights from `seed`.
    `progress(bytes done, bytes in all)` is called after every tensor.

    Raises:
        ValueError: `path` is a shape, which has no weights, and `load_format` is not "dummy"; or see
            `load_checkpoint` and `build_model`.
    """
    check_load_format(path, load_format)
    model = build_model(config, group, dtype, device)
    fill_model(model, path, load_format, seed, progress)
    return model


def fill_model(
    model: Qwen3_5ForCausalLM,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Read or draw the weights of a model that `build_model` made; arguments as for `load_model`."""
    targets = checkpoint_targets(model, model.checkpoint_name)
    if load_format == "dummy":
        report = load_dummy(targets, seed, progress)
    else:
        report = load_checkpoint(path, targets, model.skip_reason, progress)
    model.finish_loading()
    skipped = ", ".join(f"{count} {reason}" for reason, count in report.skipped.items()) or "none"
    logger.info(
        "loaded %d tensors (%.1f MB), skipped: %s", report.num_tensors, report.num_bytes / 1e6, skipped
    )
