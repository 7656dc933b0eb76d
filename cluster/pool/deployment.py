"""Builds a pool's Serve deployment from its settings; deterministic, so that a redeploy changes nothing.

Knows what a replica needs of the cluster. Knows nothing of what runs in it.
"""

from typing import Literal

from ray import serve
from ray.serve import Application

from hybridserve.cluster.pool.engine_factory import CheckpointEngine
from hybridserve.cluster.pool.replica import EngineActorOptions, PoolReplica
from hybridserve.cluster.settings import AppSettings

POOL_NAME = "pool"

# logical CPUs. Thin processes hardly compute; the CPU engine uses every core it finds, whatever it is booked
# with, and two cores must have room for one of each beside Serve's own
_REPLICA_CPUS = 0.1
_CPU_ENGINE_CPUS = 0.5
_GPU_ENGINE_CPUS = 2.0
_HEALTH_CHECK_PERIOD_S = 1.0
# above our own admission, which is the one that answers 429: cancelled calls and golden prompts come on top
_SPARE_REQUESTS = 64


def build_pool(settings: AppSettings, device: Literal["cpu", "cuda"]) -> Application:
    """The pool's deployment, bound."""
    serving = settings.serving
    on_gpu = device == "cuda"
    max_requests = serving.max_concurrent_requests + _SPARE_REQUESTS
    engine_cpus = _GPU_ENGINE_CPUS if on_gpu else _CPU_ENGINE_CPUS
    options = EngineActorOptions(
        max_concurrent_requests=max_requests,
        startup_timeout_s=serving.startup_timeout_s,
        num_cpus=engine_cpus,
        num_gpus=1.0 if on_gpu else 0.0,
    )
    deployment = serve.deployment(
        PoolReplica,
        name=POOL_NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": _REPLICA_CPUS},
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=serving.longest_answer_s,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        # the ingress logs each request; a second line for each answer says nothing more
        logging_config={"enable_access_log": False},
        # a configuration that cannot work fails the deployment at once instead of being tried twenty times
        max_constructor_retry_count=1,
    )
    if on_gpu:
        deployment = deployment.options(
            placement_group_bundles=_bundles(settings.parallel.tensor_parallel_size, engine_cpus),
            placement_group_strategy="PACK",
        )
    return deployment.bind(CheckpointEngine(settings.engine_config(device)), options)


def _bundles(tp_size: int, engine_cpus: float) -> list[dict[str, float]]:
    """Bundle 0 holds the replica and the engine (shard 0), each other bundle one shard."""
    first = {"CPU": _REPLICA_CPUS + engine_cpus, "GPU": 1.0}
    return [first, *({"CPU": 1.0, "GPU": 1.0} for _ in range(tp_size - 1))]
