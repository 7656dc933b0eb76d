"""Builds the engine in the process that runs it, so that no other process of the server loads torch."""

import os
from dataclasses import dataclass, replace

from hybridserve.cluster.garbage import collect_rarely
from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.cluster.settings_reading import in_settings_words
from hybridserve.replicas.engine.config import EngineConfig


@dataclass(frozen=True)
class CheckpointEngine:
    """The factory of an engine for a checkpoint. Picklable without torch; call it to build."""

    config: EngineConfig

    def __call__(self) -> BuiltEngine:
        # read when torch loads its OpenMP. Threads that wait by spinning take the cores that the proxy and
        # the ingress need: on two busy cores a step of 20 ms took 300
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from hybridserve.replicas.engine.build import build_engine, resolve_placement

        config = self.config
        if config.num_threads is None:
            # ray sets OMP_NUM_THREADS from the actor's logical CPUs, which say nothing of the machine; one
            # core is left to the proxy and the ingress, the others are shared by the ranks
            cores = len(os.sched_getaffinity(0)) - 1
            config = replace(config, num_threads=max(1, cores // config.tensor_parallel_size))
        try:
            engine = build_engine(config)
        except ValueError as error:
            raise ValueError(in_settings_words(str(error))) from None
        placement = resolve_placement(config, engine.model_config)
        collect_rarely()
        return BuiltEngine(engine, str(placement.device), placement.dtype_name)
