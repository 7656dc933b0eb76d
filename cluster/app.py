"""The application builder that a Serve YAML names: settings in, deployments out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ray
from ray.serve import Application

from hybridserve.cluster.ingress.deployment import build_ingress
from hybridserve.cluster.pool.deployment import build_pool
from hybridserve.cluster.settings import AppSettings, load_settings


def build_app(args: dict[str, object]) -> Application:
    """One pool and its ingress, from the YAML's `args`.

    Raises:
        ValueError: a setting is unknown or out of its bounds; the message names it.
    """
    settings = load_settings(args, Path.cwd())
    device = resolve_device(settings, ray.cluster_resources() if ray.is_initialized() else {})
    return build_ingress(settings, build_pool(settings, device))


def resolve_device(settings: AppSettings, cluster_resources: Mapping[str, float]) -> Literal["cpu", "cuda"]:
    """What `serving.device: auto` means on this cluster."""
    if settings.serving.device != "auto":
        return settings.serving.device
    wants_gpus = settings.parallel.tensor_parallel_size > 1
    return "cuda" if wants_gpus or cluster_resources.get("GPU", 0) >= 1 else "cpu"
