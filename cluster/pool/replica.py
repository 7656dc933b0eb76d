"""The pool's Serve replica: starts its actors, hands requests to the engine, and ends when one of them does.

Thin on purpose: it computes nothing and imports no torch, so that it can always answer Serve's health checks.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ray import serve
from ray.exceptions import RayActorError

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.observe.logs import log_event, set_up_logging
from hybridserve.cluster.pool.engine_loop import EngineFactory
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.pool.replica_actors import EngineActorOptions, ReplicaActors, ShardedFactory
from hybridserve.cluster.pool.shard_processes import first_line
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.scaling.policy import ARENA_USE, OUTSTANDING_TOKENS, QUEUE_AGE_S
from hybridserve.cluster.serve_alpha.spare_workers import SpareWorkers
from hybridserve.replicas.engine.plan import EngineOutput

# a process that is stopped, or whose machine is gone, is noticed by this; a dead one at once
PING_TIMEOUT_S = 10.0
# how long an engine that died in good order may take to answer its requests
_ANSWERS_S = 0.5
# how long replies may take on their way out of this process, and the engine's last frames out of its
_FLUSH_S = 0.2
_POLL_S = 0.01
_DRAIN_POLL_S = 0.5

logger = logging.getLogger(__name__)


class PoolReplica:
    """One replica of the model, as Serve sees it.

    Args:
        factory: builds the engine, in its actor's process.
        options: of the actors.

    Raises:
        RuntimeError: the engine did not start; the message says why.
    """

    async def __init__(self, factory: EngineFactory | ShardedFactory, options: EngineActorOptions) -> None:
        set_up_logging(options.logs, component="replica", pool=options.pool, replica=_replica_name())
        self._death: str | None = None
        self._dead = asyncio.Event()
        self._num_calls = 0
        self._actors = ReplicaActors(factory, options)
        self._engine = self._actors.engine
        self._info = await self._wait_for_start(options.startup_timeout_s)
        self._tasks = [asyncio.create_task(self._wait_for_death()), asyncio.create_task(self._end())]
        if options.spares is not None:
            self._tasks.append(asyncio.create_task(SpareWorkers(options.spares, _is_first).keep()))
        log_event(logger, logging.INFO, "engine_up", "the engine is up", **asdict(self._info))

    async def generate(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        """Serve a request to its end, its tokens going to `reply_to` on the way."""
        if self._death is not None:
            return GenerationReply(failed=self._death)
        with self._counted():
            return await self._generate(request, reply_to)

    async def _generate(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
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
        with self._counted():
            try:
                async for ref in self._engine.stream.remote(request, reply_to):
                    yield await ref
            except RayActorError as error:
                yield GenerationReply(failed=self._died(error))
            finally:
                self._engine.abort.remote(reply_to.key)

    async def info(self) -> EngineInfo:
        """Raises RuntimeError when the engine has died."""
        self._check()
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

    async def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError, which names the engine or the shard that does not answer; a
        replica ends by itself then, before Serve has counted enough of these."""
        self._check()
        fault = await self._actors.ping(PING_TIMEOUT_S)
        if fault is not None:
            self._die(fault)
        self._check()

    def __del__(self) -> Awaitable[None] | None:
        """Called by Serve to stop the replica, once its calls have ended and it has been out of the routing
        for a while. Returns what Serve then waits for: the requests that came by the bus."""
        return self._until_drained() if hasattr(self, "_tasks") else None

    async def _until_drained(self) -> None:
        try:
            while self._death is None and await self._engine.num_requests.remote():
                await asyncio.sleep(_DRAIN_POLL_S)
        except RayActorError as error:
            logger.warning("the engine died while its replica stopped: %s", first_line(error))

    def _check(self) -> None:
        if self._death is not None:
            raise RuntimeError(self._death)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

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
            self._die(await self._engine.wait_for_death.remote())
        except RayActorError as error:
            self._died(error)

    def _died(self, error: RayActorError) -> str:
        return self._die(f"the engine's process died: {first_line(error)}")

    def _die(self, death: str) -> str:
        """The replica ends, for this reason unless there is one already; returns the reason."""
        if self._death is None:
            self._death = death
            log_event(logger, logging.ERROR, "engine_died", death)
            self._dead.set()
        return self._death

    async def _end(self) -> None:
        """With the engine dead, tell who waits for it, then leave: Serve replaces a replica that is gone at
        its next look, one that is unhealthy only at the third, and waits for it to stop."""
        await self._dead.wait()
        # an engine whose loop has died answers its requests itself
        await self._until_answered(_ANSWERS_S)
        if self._num_calls:
            # what it has not answered fails by this
            self._actors.kill()
            await self._until_answered(_ANSWERS_S)
        await asyncio.sleep(_FLUSH_S)
        self._actors.kill()
        logging.shutdown()
        leave()

    async def _until_answered(self, timeout_s: float) -> None:
        for _ in range(round(timeout_s / _POLL_S)):
            if self._num_calls == 0:
                return
            await asyncio.sleep(_POLL_S)


def leave() -> None:
    """End this process without Ray's own end, which would wait for what is going on."""
    os._exit(1)


def _replica_name() -> str:
    """As Serve's request router knows this replica."""
    return serve.get_replica_context().replica_id.unique_id


def _is_first() -> bool:
    """Whether this is the first of its pool's replicas, of which Serve makes another one when it ends."""
    return serve.get_replica_context().rank.rank == 0
