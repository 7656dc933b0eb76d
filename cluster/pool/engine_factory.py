"""Builds the engine in the process that runs it, so that no other process of the server loads torch."""

import os
from dataclasses import dataclass, replace

from ray.actor import ActorHandle

from hybridserve.cluster.garbage import collect_rarely, collecting_nothing
from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.cluster.pool.process import threads_wait_asleep
from hybridserve.cluster.pool.shard_processes import ShardProcesses
from hybridserve.cluster.settings_reading import in_settings_words
from hybridserve.replicas.engine.config import EngineConfig


@dataclass(frozen=True)
class CheckpointEngine:
    """The factory of an engine for a checkpoint. Picklable without torch; call it to build."""

    config: EngineConfig
    shards: tuple[ActorHandle, ...] = ()
    """Actors of the ranks above 0; filled by the replica."""

    def with_shards(self, shards: tuple[ActorHandle, ...]) -> "CheckpointEngine":
        return replace(self, shards=shards)

    def __call__(self) -> BuiltEngine:
        threads_wait_asleep()
        with collecting_nothing():
            from hybridserve.replicas.engine.build import build_engine
            from hybridserve.replicas.engine.placement import resolve_placement

        config = self.config
        if config.num_threads is None:
            # ray sets OMP_NUM_THREADS from the actor's logical CPUs, which say nothing of the machine; one
            # core is left to the proxy and the ingress, the others are shared by the ranks
            cores = len(os.sched_getaffinity(0)) - 1
            config = replace(config, num_threads=max(1, cores // config.tensor_parallel_size))
        try:
            engine = build_engine(config, processes=ShardProcesses(self.shards) if self.shards else None)
        except ValueError as error:
            raise ValueError(in_settings_words(str(error))) from None
        placement = resolve_placement(config, engine.model_config)
        collect_rarely()
        return BuiltEngine(engine, str(placement.device), placement.dtype_name)
