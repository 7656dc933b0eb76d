"""The actors of one replica: the engine in bundle 0 and a shard in each other bundle of its placement group.

Knows how they are placed, asked whether they live, and ended; nothing of requests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridserve.cluster.access.options import BusTls
from hybridserve.cluster.observe.logs import LogOptions
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.engine_loop import BuiltEngine, EngineFactory
from hybridserve.cluster.pool.shard_actor import ShardActor
from hybridserve.cluster.pool.shard_processes import first_line
from hybridserve.cluster.serve_alpha.spare_workers import SpareWorkersOptions

# calls that may wait beside the admitted requests: cancels, loads, pings, the watch for the actor's death
_SPARE_CALLS = 100


@dataclass(frozen=True)
class EngineActorOptions:
    """How a replica's actors are placed, and how long they may take."""

    max_concurrent_requests: int
    startup_timeout_s: float
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    """Of the engine, and of each other shard."""
    num_shards: int = 1
    """The engine is the first."""
    shard_cpus: float = 0.0
    """Of each shard but the engine."""
    stuck_after_s: float = 60.0
    """How long a step may take."""
    pool: str = ""
    """The name of the pool, for log lines."""
    logs: LogOptions = LogOptions()
    bus_tls: BusTls | None = None
    """Certificates for the token bus; None: in the clear."""
    spares: SpareWorkersOptions | None = None
    """Processes to keep ready for the next replica; None: none."""


class ShardedFactory(Protocol):
    """A factory of engines of several shards."""

    def with_shards(self, shards: tuple[ActorHandle, ...]) -> Callable[[], BuiltEngine]:
        """The factory of an engine whose ranks above 0 are these actors."""


class ReplicaActors:
    """Started by the constructor; they die with this process, however that one ends.

    Args:
        factory: builds the engine; a `ShardedFactory` where `options.num_shards` is more than 1.

    Raises:
        RuntimeError: there are to be several shards, and no placement group with a bundle for each.
    """

    def __init__(self, factory: EngineFactory | ShardedFactory, options: EngineActorOptions) -> None:
        group = get_current_placement_group()
        self._size = options.num_shards
        if self._size > 1:
            bundles = 0 if group is None else group.bundle_count
            if bundles != self._size:
                raise RuntimeError(f"{self._size} shards need as many bundles, the replica has {bundles}")
        # before the engine, so that they load what they need beside it
        self.shards = tuple(_start_shard(options, group, rank) for rank in range(1, self._size))
        if self.shards:
            factory = factory.with_shards(self.shards)
        self.engine: ActorHandle = (
            ray.remote(EngineActor)
            .options(
                num_cpus=options.num_cpus,
                num_gpus=options.num_gpus,
                max_concurrency=options.max_concurrent_requests + _SPARE_CALLS,
                scheduling_strategy="DEFAULT" if group is None else _in_bundle(group, 0),
            )
            .remote(factory, options.pool, options.logs, options.bus_tls, options.stuck_after_s)
        )

    async def ping(self, timeout_s: float) -> str | None:
        """Who is dead, or does not answer within that time; None when all do."""
        named = {"the engine": self.engine}
        named |= {f"rank {rank} of {self._size}": shard for rank, shard in enumerate(self.shards, 1)}
        faults = await asyncio.gather(*(_ping(name, actor, timeout_s) for name, actor in named.items()))
        return next((fault for fault in faults if fault is not None), None)

    def kill(self) -> None:
        """End them all, at once; calls that they have not answered fail."""
        for actor in (self.engine, *self.shards):
            ray.kill(actor)


async def _ping(name: str, actor: ActorHandle, timeout_s: float) -> str | None:
    try:
        async with asyncio.timeout(timeout_s):
            await actor.ping.remote()
    except TimeoutError:
        return f"{name} has not answered for {timeout_s:g} s"
    except RayActorError as error:
        return f"{name} died: {first_line(error)}"
    return None


def _start_shard(options: EngineActorOptions, group: PlacementGroup, rank: int) -> ActorHandle:
    return (
        ray.remote(ShardActor)
        .options(
            num_cpus=options.shard_cpus,
            num_gpus=options.num_gpus,
            scheduling_strategy=_in_bundle(group, rank),
        )
        .remote(rank, options.pool, options.logs)
    )


def _in_bundle(group: PlacementGroup, rank: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
