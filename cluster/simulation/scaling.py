"""Serve's part in autoscaling: the policy is asked every second about a pool, and the ledger for GPUs."""

from dataclasses import dataclass

from hybridserve.cluster.scaling.gpu_ledger import GpuLedger
from hybridserve.cluster.scaling.policy import ScalingMemory, ScalingRule, decide
from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.pool import SimulatedPool

_PERIOD_S = 1.0


@dataclass(frozen=True)
class Scaling:
    """How one pool scales."""

    rule: ScalingRule
    gpus_per_replica: float
    max_gpus: float
    """Of all pools together."""
    start_s: float
    """From a decision to a replica that serves."""


class PoolScaler:
    """Asks the policy for one pool, as long as there are requests.

    Args:
        claims: the ledger of all pools.
    """

    def __init__(self, pool: SimulatedPool, scaling: Scaling, clock: VirtualClock, claims: GpuLedger) -> None:
        self._pool = pool
        self._scaling = scaling
        self._clock = clock
        self._claims = claims
        self._memory = ScalingMemory()
        self._stopped = False
        clock.at(clock.now + _PERIOD_S, self._turn)

    def stop(self) -> None:
        """There is no request any more."""
        self._stopped = True

    def _turn(self) -> None:
        if self._stopped:
            return
        scaling, pool = self._scaling, self._pool
        wanted, self._memory = decide(scaling.rule, pool.signals(), self._memory, self._clock.now)
        granted = self._claims.grant(
            pool.spec.name, pool.wanted, wanted, scaling.gpus_per_replica, scaling.max_gpus
        )
        if granted != pool.wanted:
            pool.scale_to(granted, scaling.start_s)
        self._clock.at(self._clock.now + _PERIOD_S, self._turn)
