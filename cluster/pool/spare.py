"""What a worker process without work loads, so that it can at once be any of a replica's processes.

Knows the modules and their order; nothing of who keeps such processes, and when.
"""

import importlib
import logging
from collections.abc import Sequence

from hybridserve.cluster.garbage import collecting_nothing
from hybridserve.cluster.pool.process import threads_wait_asleep

# of a shard or an engine, which all but fill the time of a start, then of the replica's own actor. None of
# them looks for a GPU when it is imported: the process does not know yet which one it will have
MODULES = (
    "torch",
    "hybridserve.replicas.engine.rank",
    "hybridserve.cluster.pool.engine_factory",
    "ray.serve._private.replica",
    "hybridserve.cluster.pool.replica",
)

logger = logging.getLogger(__name__)


def load(modules: Sequence[str] = MODULES) -> None:
    """Import them, as the processes of a replica would; what fails is left to who needs it."""
    threads_wait_asleep()
    with collecting_nothing():
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception:
                # a node without torch, say, that has no replicas either
                logger.warning("a spare process could not load %s", module, exc_info=True)
