"""The pool's Serve replica: starts the engine's actor, hands requests to it, and notices its death.

Thin on purpose: it computes nothing and imports no torch, so that it can always answer Serve's health checks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.observe.logs import LogOptions, log_event, set_up_logging
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.engine_loop import EngineFactory
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.scaling.policy import ARENA_USE, OUTSTANDING_TOKENS, QUEUE_AGE_S
from hybridserve.replicas.engine.plan import EngineOutput

# calls that may wait beside the admitted requests: cancels, loads, the watch for the actor's death
_SPARE_CALLS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineActorOptions:
    """How the engine's actor is placed and how long it may take to start."""

    max_concurrent_requests: int
    startup_timeout_s: float
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    pool: str = ""
    """The name of the pool, for log lines."""
    logs: LogOptions = LogOptions()


class PoolReplica:
    """One replica of the model, as Serve sees it.

    Args:
        factory: builds the engine, in the actor's process.
        options: of the actor.

    Raises:
        RuntimeError: the engine did not start; the message says why.
    """

    async def __init__(self, factory: EngineFactory, options: EngineActorOptions) -> None:
        set_up_logging(options.logs, component="replica", pool=options.pool, replica=_replica_name())
        self._death: str | None = None
        self._engine = _start_actor(factory, options)
        self._info = await self._wait_for_start(options.startup_timeout_s)
        self._watch = asyncio.create_task(self._wait_for_death())
        log_event(logger, logging.INFO, "engine_up", "the engine is up", **asdict(self._info))

    async def generate(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        """Serve a request to its end, its tokens going to `reply_to` on the way."""
        if self._death is not None:
            return GenerationReply(failed=self._death)
        try:
            return await self._engine.generate.remote(request, reply_to)
        except RayActorError as error:
            return GenerationReply(failed=self._died(error))
        except asyncio.CancelledError:
            self._engine.abort.remote(reply_to.key)
            raise

    async def stream(
        self, request: GenerationRequest, reply_to: ReplyTo
    ) -> AsyncIterator[EngineOutput | GenerationReply]:
        """Serve a request without the token bus."""
        if self._death is not None:
            yield GenerationReply(failed=self._death)
            return
        try:
            async for ref in self._engine.stream.remote(request, reply_to):
                yield await ref
        except RayActorError as error:
            yield GenerationReply(failed=self._died(error))
        finally:
            self._engine.abort.remote(reply_to.key)

    async def info(self) -> EngineInfo:
        """Raises RuntimeError when the engine has died."""
        self.check_health()
        return self._info

    async def load(self) -> ReplicaLoad | None:
        return await self._engine.load.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for a pool that scales; what the pool's policy goes by."""
        load = await self.load()
        if load is None:
            return {}
        return {
            OUTSTANDING_TOKENS: float(load.outstanding_tokens),
            QUEUE_AGE_S: load.queue_age_s,
            ARENA_USE: load.arena_use,
        }

    def check_health(self) -> None:
        """Called by Serve; a replica whose engine has died is replaced."""
        if self._death is not None:
            raise RuntimeError(self._death)

    async def _wait_for_start(self, timeout_s: float) -> EngineInfo:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._engine.start.remote(_replica_name())
        except TimeoutError:
            raise RuntimeError(f"the engine did not start within startup_timeout_s={timeout_s:g}") from None
        except RayActorError as error:
            raise RuntimeError(f"the engine did not start: {self._died(error)}") from None
        if isinstance(answer, str):
            raise RuntimeError(f"the engine did not start: {answer}")
        return answer

    async def _wait_for_death(self) -> None:
        try:
            self._death = await self._engine.wait_for_death.remote()
        except RayActorError as error:
            self._died(error)
        log_event(logger, logging.ERROR, "engine_died", self._death or "")

    def _died(self, error: RayActorError) -> str:
        self._death = self._death or f"the engine's process died: {str(error).splitlines()[0]}"
        return self._death


def _replica_name() -> str:
    """As Serve's request router knows this replica."""
    return serve.get_replica_context().replica_id.unique_id


def _start_actor(factory: EngineFactory, options: EngineActorOptions) -> ray.actor.ActorHandle:
    """An actor that dies with this process; inside the replica's placement group when it has one."""
    group = get_current_placement_group()
    strategy = (
        "DEFAULT"
        if group is None
        else PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    )
    actor = ray.remote(EngineActor).options(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        max_concurrency=options.max_concurrent_requests + _SPARE_CALLS,
        scheduling_strategy=strategy,
    )
    return actor.remote(factory, options.pool, options.logs)
