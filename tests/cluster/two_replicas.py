"""One pool of two engines in this process: router, client and bus, and a handle in the place of Serve's."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ray.exceptions import RayActorError

from hybridserve.cluster.bus.frames import ReplyTo
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.sender import Channel
from hybridserve.cluster.bus.stream import MAX_UNREAD_TOKENS
from hybridserve.cluster.bus.submission import Submission
from hybridserve.cluster.pool.client import HandlePoolClient
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.pool.retry import RetryPolicy
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.replicas.sampling_params import SamplingParams

SPEC = PoolSpec("p", 0, None, 1, ReplicaRange(2, 2), (), PoolLimits(100, 10**6, 30.0, 1.0, 1.0))


class Response:
    """A task in the clothes of Serve's DeploymentResponse."""

    def __init__(self, coroutine) -> None:
        self.task = asyncio.ensure_future(coroutine)

    def __await__(self):
        return asyncio.shield(self.task).__await__()

    def cancel(self) -> None:
        self.task.cancel()


class _Info:
    def __init__(self) -> None:
        self.engine: EngineInfo | None = None

    def remote(self) -> Response:
        return Response(asyncio.sleep(0, self.engine))


class CountedActor(EngineActor):
    """Counts the requests that come by the bus, and can lose its connections as a dead process does."""

    by_bus = 0

    def on_submission(self, channel: Channel, submission: Submission) -> None:
        self.by_bus += 1
        super().on_submission(channel, submission)

    def hang_up(self) -> None:
        for channel in self._sender._channels.values():
            self.on_ingress_gone(channel)
            channel._task.cancel()


class Replicas:
    """The pool's handle: chooses as Serve's router does, and calls the engine's actor as the replica does."""

    def __init__(self, loads: PoolLoads) -> None:
        self.loads = loads
        self.up: dict[str, CountedActor] = {}
        self._actors: dict[str, CountedActor] = {}
        self.dead: set[str] = set()
        """Their replicas still answer, that their engine is dead."""
        self._calls: Counter[str] = Counter()
        self.running: dict[str, set[asyncio.Task]] = {}
        self.ready = asyncio.Event()
        self.generate = self
        self.info = _Info()

    @property
    def calls(self) -> Counter[str]:
        """Requests that each has got, by a call or by the bus."""
        return self._calls + Counter({name: actor.by_bus for name, actor in self._actors.items()})

    def add(self, name: str, actor: CountedActor) -> None:
        self.up[name] = self._actors[name] = actor
        self.loads.set_replicas(self.up)
        self.ready.set()

    def remove(self, name: str) -> None:
        """As Serve does when it has noticed."""
        del self.up[name]
        self.loads.set_replicas(self.up)
        self.ready = asyncio.Event() if not self.up else self.ready

    def kill(self, name: str) -> None:
        """The replica's actor dies, and its engine with it."""
        self.dead.add(name)
        for task in list(self.running.get(name, ())):
            task.cancel()
        self.up[name].hang_up()

    def remote(self, request: GenerationRequest, reply_to: ReplyTo) -> Response:
        return Response(self._call(request, reply_to))

    async def _call(self, request: GenerationRequest, reply_to: ReplyTo) -> GenerationReply:
        await self.ready.wait()
        name = self.loads.choose(list(self.up), request.request_id)[0]
        self.loads.routed(request.request_id, name)
        self._calls[name] += 1
        if name in self.dead:
            return GenerationReply(failed="the engine died a while ago")
        actor = self.up[name]
        task = asyncio.ensure_future(actor.generate(request, reply_to))
        self.running.setdefault(name, set()).add(task)
        try:
            return await task
        except asyncio.CancelledError:
            await actor.abort(reply_to.key)
            if name in self.dead:
                raise RayActorError() from None
            raise


class Pool:
    def __init__(self, router: LengthRouter, routed: RoutedPool, replicas: Replicas, listener: BusListener):
        self.router, self.routed, self.replicas, self.listener = router, routed, replicas, listener
        self.seen: dict[str, list[int]] = {}

    async def answer(self, name: str, first: int, count: int = 60, **sampling: object) -> list[int]:
        params = SamplingParams(max_tokens=count, **sampling)
        tokens = self.seen[name] = []
        async for output in self.router.generate(GenerationRequest(name, (first,), params, count)):
            assert output.first_index == len(tokens)
            tokens.extend(output.token_ids)
        return tokens

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    def idle(self) -> bool:
        totals = self.routed.loads.totals()
        return not self.listener.num_streams and totals.own_requests == totals.own_outstanding == 0


@asynccontextmanager
async def two_replicas(
    factory: Callable[[], object], policy: RetryPolicy, max_unread_tokens: int = MAX_UNREAD_TOKENS
) -> AsyncIterator[Pool]:
    loads = PoolLoads()
    replicas = Replicas(loads)
    listener = BusListener("127.0.0.1", loads, max_unread_tokens)
    await listener.start()
    actors = {}
    for name in ("a", "b"):
        actors[name] = CountedActor(factory)
        replicas.info.engine = await actors[name].start(name)
        assert isinstance(replicas.info.engine, EngineInfo)
        replicas.add(name, actors[name])
    client = HandlePoolClient(replicas, listener, "bus", loads)
    routed = RoutedPool(SPEC, client, loads, Admission("p", SPEC.limits, 1), retry=policy)
    try:
        yield Pool(LengthRouter([routed]), routed, replicas, listener)
    finally:
        for actor in actors.values():
            await actor.close()
        await listener.close()
