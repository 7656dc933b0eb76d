"""Builds a pool's Serve deployment from its settings; deterministic, so that a redeploy changes nothing.

Knows what a replica needs of the cluster. Knows nothing of what runs in it.
"""

from typing import Literal

from ray import serve
from ray.serve import Application

from hybridserve.cluster.pool.engine_factory import CheckpointEngine
from hybridserve.cluster.pool.engine_loop import EngineFactory
from hybridserve.cluster.pool.replica import PoolReplica
from hybridserve.cluster.pool.replica_actors import EngineActorOptions
from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.serve_alpha.autoscaling import replica_options
from hybridserve.cluster.serve_alpha.placement import REPLICA_CPUS, plan_placement
from hybridserve.cluster.serve_alpha.request_router import router_config
from hybridserve.cluster.serve_alpha.spare_workers import SpareWorkersOptions
from hybridserve.cluster.settings import ONLY_POOL, AppSettings

_HEALTH_CHECK_PERIOD_S = 1.0
# above our own admission, which is the one that answers 429: cancelled calls and golden prompts come on top
_SPARE_REQUESTS = 64


def build_pool(
    settings: AppSettings,
    spec: PoolSpec,
    device: Literal["cpu", "cuda"],
    factory: EngineFactory | None = None,
) -> Application:
    """One pool's deployment, bound.

    factory: of its engines; by default the settings' model.
    """
    serving = settings.serving_of(spec.name)
    placement = plan_placement(spec.tensor_parallel_size, device)
    max_requests = serving.max_concurrent_requests + _SPARE_REQUESTS
    # the replica's own process, and one for each shard
    spares = SpareWorkersOptions(1 + spec.tensor_parallel_size, placement.cpus, placement.gpus)
    options = EngineActorOptions(
        max_concurrent_requests=max_requests,
        startup_timeout_s=serving.startup_timeout_s,
        num_cpus=placement.engine_cpus,
        num_gpus=placement.shard_gpus,
        num_shards=spec.tensor_parallel_size,
        shard_cpus=placement.shard_cpus,
        stuck_after_s=serving.stuck_after_s,
        pool=spec.name,
        logs=settings.logging.options,
        bus_tls=settings.access.bus_tls,
        spares=spares if serving.keeps_spares(device) else None,
    )
    deployment = serve.deployment(
        PoolReplica,
        name=deployment_name(spec),
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=serving.longest_answer_s,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        request_router_config=router_config(spec.name),
        logging_config=settings.logging.serve_config,
        max_surge_percent=serving.max_surge_percent,
        # a configuration that cannot work fails the deployment at once instead of being tried twenty times
        max_constructor_retry_count=1,
        **replica_options(settings, spec, device),
        **placement.options,
    )
    return deployment.bind(factory or CheckpointEngine(settings.engine_config(device, spec)), options)


def deployment_name(spec: PoolSpec) -> str:
    """How Serve knows the pool."""
    return spec.name if spec.name == ONLY_POOL else f"pool-{spec.name}"
