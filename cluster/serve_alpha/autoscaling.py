"""Serve's autoscaling hook for a pool: carries Serve's figures to the pure policy and the decision back.

Serve copies this module by value into its controller; what pools share there is in `gpu_ledger`.
"""

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from hybridserve.cluster.routing.pool_spec import PoolSpec
from hybridserve.cluster.scaling.gpu_ledger import gpu_ledger
from hybridserve.cluster.scaling.policy import (
    ARENA_USE,
    OUTSTANDING_TOKENS,
    QUEUE_AGE_S,
    PoolSignals,
    ScalingMemory,
    ScalingRule,
    decide,
)
from hybridserve.cluster.serve_alpha.placement import plan_placement
from hybridserve.cluster.settings import AppSettings

_MEMORY = "memory"
_CLUSTER_PERIOD_S = 5.0
_REPORT_PERIOD_S = 1.0
# Serve averages over this time the requests that wait for any replica
_LOOK_BACK_S = 5.0

logger = logging.getLogger("ray.serve")


class PoolScalingPolicy:
    """Made by Serve in its controller, one for each pool.

    Args:
        pool: its name.
        rule: fields of a `ScalingRule`.
        gpus_per_replica: of this pool.
        claims: GPUs that each pool holds at least.
        max_gpus: of all pools; None: those of the cluster.
    """

    def __init__(
        self,
        pool: str,
        rule: Mapping[str, float],
        gpus_per_replica: float,
        claims: Mapping[str, float],
        max_gpus: int | None,
    ) -> None:
        self._pool = pool
        self._rule = ScalingRule(**rule)
        self._gpus_per_replica = gpus_per_replica
        self._claims = claims
        self._max_gpus = max_gpus
        self._cluster_gpus = 0.0
        self._cluster_asked = float("-inf")

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        signals = _signals(context)
        memory = ScalingMemory(**context.policy_state.get(_MEMORY, {}))
        wanted, memory = decide(self._rule, signals, memory, context.current_time)
        ledger = gpu_ledger(context.app_name)
        ledger.seed(self._claims)
        granted = ledger.grant(
            self._pool, signals.replicas, wanted, self._gpus_per_replica, self._total_gpus()
        )
        if granted != signals.replicas:
            logger.info("pool %s: replicas %d -> %d, %s", self._pool, signals.replicas, granted, signals)
        elif granted != wanted:
            logger.info("pool %s: %d replicas are wanted, GPUs allow %d", self._pool, wanted, granted)
        return granted, {_MEMORY: asdict(memory)}

    def _total_gpus(self) -> float:
        if self._max_gpus is not None:
            return self._max_gpus
        now = time.monotonic()
        if now - self._cluster_asked > _CLUSTER_PERIOD_S:
            self._cluster_asked = now
            self._cluster_gpus = ray.cluster_resources().get("GPU", 0.0)
        return self._cluster_gpus


def _signals(context: AutoscalingContext) -> PoolSignals:
    latest = {name: _latest(context, name) for name in (OUTSTANDING_TOKENS, QUEUE_AGE_S, ARENA_USE)}
    arenas = latest[ARENA_USE]
    return PoolSignals(
        replicas=context.target_num_replicas,
        reporting=len(latest[OUTSTANDING_TOKENS]),
        outstanding_tokens=sum(latest[OUTSTANDING_TOKENS]),
        queue_age_s=max(latest[QUEUE_AGE_S], default=0.0),
        arena_use=sum(arenas) / len(arenas) if arenas else 0.0,
        unrouted_requests=context.total_queued_requests or 0.0,
    )


def _latest(context: AutoscalingContext, name: str) -> list[float]:
    """Each running replica's last figure."""
    series = (context.raw_metrics or {}).get(name, {})
    running = set(context.running_replicas)
    return [points[-1].value for replica, points in series.items() if points and replica in running]


def replica_options(
    settings: AppSettings, spec: PoolSpec, device: Literal["cpu", "cuda"]
) -> dict[str, object]:
    """The deployment's options that say how many replicas it has."""
    if spec.replicas.fixed:
        return {"num_replicas": spec.replicas.max}
    scaling = settings.autoscaling
    gpus = {one.name: plan_placement(one.tensor_parallel_size, device).gpus for one in settings.pool_specs()}
    rule = scaling.rule_of(spec)
    policy = AutoscalingPolicy(
        policy_function=f"{__name__}:{PoolScalingPolicy.__name__}",
        policy_kwargs={
            "pool": spec.name,
            "rule": asdict(rule),
            "gpus_per_replica": gpus[spec.name],
            "claims": {one.name: one.replicas.min * gpus[one.name] for one in settings.pool_specs()},
            "max_gpus": scaling.max_gpus,
        },
    )
    with warnings.catch_warnings():
        # Serve 2.60 calls metrics_interval_s deprecated, and its replicas go by nothing else
        warnings.simplefilter("ignore", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=spec.replicas.min,
            max_replicas=spec.replicas.max,
            initial_replicas=spec.replicas.min,
            metrics_interval_s=_REPORT_PERIOD_S,
            look_back_period_s=_LOOK_BACK_S,
            # the rule has delays of its own, and takes each replica's last figure
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        )
    return {"autoscaling_config": config}
