"""Where a replica runs: the placement group that Serve reserves for each replica of a pool."""

from dataclasses import dataclass
from typing import Literal

# logical CPUs. Thin processes hardly compute; the CPU engine uses every core it finds, whatever it is booked
# with, and two cores must have room for one of each beside Serve's own
REPLICA_CPUS = 0.1
_CPU_ENGINE_CPUS = 0.5
_GPU_ENGINE_CPUS = 2.0
_SHARD_CPUS = 1.0


@dataclass(frozen=True)
class Placement:
    """One replica's bundles; bundle 0 holds the replica's actor and the engine, which is shard 0."""

    bundles: tuple[dict[str, float], ...]
    strategy: Literal["STRICT_PACK"]
    """All on one node: shards exchange activations twice a layer."""
    engine_cpus: float
    shard_cpus: float
    """Of each shard but the engine."""
    shard_gpus: float
    """Of each shard."""

    @property
    def gpus(self) -> float:
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)

    @property
    def cpus(self) -> float:
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def options(self) -> dict[str, object]:
        """For a Serve deployment; the group is left out when one process' share of a node is all there is."""
        if len(self.bundles) == 1 and not self.gpus:
            return {}
        return {
            "placement_group_bundles": list(self.bundles),
            "placement_group_strategy": self.strategy,
        }


def plan_placement(tp_size: int, device: Literal["cpu", "cuda"]) -> Placement:
    """The bundles of a replica of `tp_size` shards, one for each."""
    gpu = {"GPU": 1.0} if device == "cuda" else {}
    engine_cpus = _GPU_ENGINE_CPUS if device == "cuda" else _CPU_ENGINE_CPUS
    shard_cpus = _SHARD_CPUS if gpu else _CPU_ENGINE_CPUS
    first = {"CPU": REPLICA_CPUS + engine_cpus, **gpu}
    others = ({"CPU": shard_cpus, **gpu} for _ in range(tp_size - 1))
    return Placement((first, *others), "STRICT_PACK", engine_cpus, shard_cpus, 1.0 if gpu else 0.0)
