"""Where an engine's ranks run: device, dtype, backend, and whether there is a place for each."""

import os
from dataclasses import dataclass

import torch

from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.ranks import RankProcesses
from hybridserve.replicas.models.sharding import check_tp_size
from hybridserve.replicas.models.specs import ModelConfig


@dataclass(frozen=True)
class Placement:
    """Where and in what the model runs."""

    device: torch.device
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)


def resolve_placement(config: EngineConfig, model_config: ModelConfig, device_index: int = 0) -> Placement:
    """Settle "auto": a GPU if there is one, for one rank of several that of `device_index` among those that
    are visible; the checkpoint's dtype on a GPU, float32 on a CPU."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("device is 'cuda', but torch sees no CUDA device")
    on_gpu = available and config.device != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu and config.tensor_parallel_size > 1:
        device = torch.device("cuda", device_index)
    dtype = config.dtype
    if dtype == "auto":
        dtype = model_config.dtype if device.type == "cuda" else "float32"
    return Placement(device, dtype)


def rank_backend(device: torch.device) -> str:
    """How ranks on such devices talk to each other."""
    return "nccl" if device.type == "cuda" else "gloo"


def check_tensor_parallel_size(
    config: EngineConfig, model_config: ModelConfig, placement: Placement, processes: RankProcesses
) -> None:
    """Raise ValueError unless the model can be cut in so many and this machine has a GPU for each part that
    is to share it with this process."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    try:
        check_tp_size(model_config, size)
    except ValueError as error:
        raise ValueError(f"tensor_parallel_size is {size}, but {error}") from None
    # where every process sees its own GPU alone, there is nothing to count here
    if placement.device.type == "cuda" and processes.device_index(size - 1) > 0:
        check_gpus(size, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_gpus(size: int, num_gpus: int, visible: str | None) -> None:
    """Raise ValueError unless every rank has a GPU of its own; rank r has the r-th that is visible."""
    if size > num_gpus:
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise ValueError(f"tensor_parallel_size is {size}, but torch sees {num_gpus} CUDA devices{why}")
