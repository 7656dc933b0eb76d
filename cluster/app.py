"""The application builder that a Serve YAML names: settings in, deployments out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ray
from ray.serve import Application

from hybridserve.cluster.ingress.deployment import build_ingress
from hybridserve.cluster.plan import check_shards
from hybridserve.cluster.pool.deployment import build_pool
from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import load_settings


def build_app(args: dict[str, object]) -> Application:
    """The pools and their ingress, from the YAML's `args`.

    Raises:
        ValueError: a setting is unknown or out of its bounds; the message names it.
    """
    settings = load_settings(args, Path.cwd())
    check_shards(settings)
    device = resolve_device(settings, ray.cluster_resources() if ray.is_initialized() else {})
    pools = {spec.name: build_pool(settings, spec, device) for spec in settings.pool_specs()}
    return build_ingress(settings, pools)


def resolve_device(settings: AppSettings, cluster_resources: Mapping[str, float]) -> Literal["cpu", "cuda"]:
    """What `serving.device: auto` means on this cluster."""
    if settings.serving.device != "auto":
        return settings.serving.device
    wants_gpus = any(spec.tensor_parallel_size > 1 for spec in settings.pool_specs())
    return "cuda" if wants_gpus or cluster_resources.get("GPU", 0) >= 1 else "cpu"
