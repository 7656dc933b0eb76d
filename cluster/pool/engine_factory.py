"""Builds the engine in the process that runs it, so that no other process of the server loads torch."""

import os
from dataclasses import dataclass, replace

from hybridserve.cluster.pool.engine_loop import Engine
from hybridserve.replicas.engine.config import EngineConfig


@dataclass(frozen=True)
class EngineFactory:
    """Picklable without torch; call it to get the engine."""

    config: EngineConfig

    def __call__(self) -> Engine:
        from hybridserve.replicas.engine.engine import build_engine

        if self.config.num_threads is None:
            # ray sets OMP_NUM_THREADS from the actor's logical CPUs, a share that says nothing of the machine
            return build_engine(replace(self.config, num_threads=len(os.sched_getaffinity(0))))
        return build_engine(self.config)
