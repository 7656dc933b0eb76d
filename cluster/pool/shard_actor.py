"""One rank above 0 as a Ray actor, in a bundle of its own; rank 0 is the engine's actor.

Loads torch by itself and not when this module is imported: the replica, which starts it, does without.
"""

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING

import ray

from hybridserve.cluster.garbage import collecting_nothing
from hybridserve.cluster.observe.logs import LogOptions, set_up_logging
from hybridserve.cluster.pool.process import threads_wait_asleep

if TYPE_CHECKING:
    from hybridserve.replicas.engine.ranks import RankStart

# a last resort: with the engine's process its replica ends, and Ray ends this one with that
_LONGEST_SILENCE_S = 30.0

logger = logging.getLogger(__name__)


class ShardActor:
    """Runs its rank on a thread of its own, so that it can always answer `ping`.

    Args:
        rank, pool: for log lines.
        logs: how its process logs.
    """

    def __init__(self, rank: int, pool: str, logs: LogOptions) -> None:
        set_up_logging(logs, component="shard", pool=pool, rank=str(rank))
        threads_wait_asleep()
        # takes seconds, and the engine's process has as much to do before it can say what the rank is
        threading.Thread(target=_load, name="load", daemon=True).start()

    async def run(self, start: "RankStart") -> str | None:
        """Be that rank until rank 0 ends it; then None, or why it has failed."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str | None] = loop.create_future()

        def work() -> None:
            try:
                reason = _run(start)
            except Exception as error:
                # of meeting the others; what comes after is told on their store, too
                logger.exception("rank %d failed", start.rank)
                reason = f"{type(error).__name__}: {error}"
            loop.call_soon_threadsafe(ended.set_result, reason)

        threading.Thread(target=work, name=f"rank {start.rank}", daemon=True).start()
        return await ended

    async def ping(self) -> None:
        """Answers while the process lives."""


def _load() -> None:
    with collecting_nothing():
        from hybridserve.replicas.engine import rank  # noqa: F401


def _run(start: "RankStart") -> str | None:
    from hybridserve.replicas.engine.rank import run_rank

    return run_rank(start, ray.util.get_node_ip_address(), lambda: False, _leave, _LONGEST_SILENCE_S)


def _leave(reason: str) -> None:
    logger.warning("%s: leaving", reason)
    os._exit(1)
