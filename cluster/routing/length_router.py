"""The length router: picks the pool for a request, and decides whether there is room for it.

A plain object inside each ingress replica, no hop of its own; to the ingress it is a `PoolClient` like the
pools behind it. Knows nothing of HTTP or Ray.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from hybridserve.cluster.observe.trail import current_answer
from hybridserve.cluster.pool.interface import (
    EngineInfo,
    GenerationRequest,
    PoolBusy,
    PoolClient,
    PoolError,
    ReplicaFailed,
)
from hybridserve.cluster.pool.retry import Attempts, RetryPolicy, begin
from hybridserve.cluster.routing.admission import Admission, Priority, Refusal
from hybridserve.cluster.routing.cost import Cost, cost_of
from hybridserve.cluster.routing.load import ReplicaLoad, sum_loads
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolSpec, bucket_of
from hybridserve.cluster.routing.prefixes import prefix_of
from hybridserve.cluster.routing.state import PoolState, ReplicaState, RetryOutcome
from hybridserve.replicas.engine.plan import EngineOutput

# a bucket borrows when its own pool is this full, and only from a pool that stays this idle
_BORROW_ABOVE = 0.5
_LEND_BELOW = 0.1
# of any request
_LEAST = Cost(prompt_tokens=1, answer_tokens=1)

logger = logging.getLogger("ray.serve")

# between two questions to a pool that is not up
_LEARN_S = 0.5


@dataclass
class RoutedPool:
    """A pool, and what this ingress did with it."""

    spec: PoolSpec
    client: PoolClient
    loads: PoolLoads
    admission: Admission
    decisions: Counter[str] = field(default_factory=Counter)
    """Requests sent here: "own" from its bucket, "borrowed" from a shorter one."""
    rejections: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests of its bucket refused, by reason and priority."""
    retry: RetryPolicy = RetryPolicy()
    retries: Counter[RetryOutcome] = field(default_factory=Counter)
    """Requests that a replica failed, by what became of them."""

    def state(self) -> PoolState:
        totals = self.loads.totals()
        reports = self.loads.reports()
        return PoolState(
            spec=self.spec,
            replicas=tuple(
                ReplicaState(name, self.loads.outstanding(name), reports.get(name))
                for name in self.loads.replicas()
            ),
            budget_tokens=self.admission.budget(totals),
            outstanding_tokens=totals.outstanding,
            queued_tokens=totals.queued,
            own_requests=totals.own_requests,
            tokens_per_s=totals.tokens_per_s,
            queue_wait_s=totals.queue_wait_s,
            decisions=dict(self.decisions),
            rejections=dict(self.rejections),
            prefix_hits=self.loads.prefix_hits,
            retries=dict(self.retries),
            unnamed_load=self.client.load(),
        )

    def after_failure(self, attempts: Attempts, error: PoolError) -> float | None:
        """Seconds until the next attempt, or None when the client is to be told; either is counted."""
        if not isinstance(error, ReplicaFailed):
            return None
        name = attempts.request.request_id
        pause = attempts.pause_after(error, self.loads.failed(name))
        what = "fails" if pause is None else "goes to another replica"
        logger.warning("pool %s: request %s %s: %s", self.spec.name, name, what, error)
        if pause is None:
            self.retries["failed"] += 1
        return pause


async def _learn(pool: RoutedPool) -> None:
    while True:
        try:
            await pool.client.info()
            return
        except PoolError as error:
            logger.debug("pool %s has not said what it is yet: %s", pool.spec.name, error)
            await asyncio.sleep(_LEARN_S)


class LengthRouter:
    """Routes over pools and admits.

    Args:
        pools: by length, the last one's bucket without a bound.
    """

    def __init__(self, pools: Sequence[RoutedPool]) -> None:
        self._pools = tuple(pools)
        self.max_choices = min(pool.admission.max_requests for pool in pools)
        """Answers that one request may ever have in flight: each is a request of a pool's."""
        self._lasting = tuple(pool for pool in pools if pool.spec.replicas.min > 0)
        """Those that always have a replica."""
        self._specs = [pool.spec for pool in pools]
        self._by_name = {pool.spec.name: pool for pool in pools}

    async def info(self) -> EngineInfo:
        """The pools' engines as one: the shortest context, as a sequence may run in any of them.

        Pools that may have no replicas are not asked, as a call starts one, unless all are of that kind.
        """
        asked = self._lasting or self._pools[:1]
        infos = await asyncio.gather(*(pool.client.info() for pool in asked))
        return min(infos, key=lambda info: info.max_model_len)

    async def learn(self) -> None:
        """Ask the engines of pools that always have one for their facts, until all have told.

        Who knows them before the first request comes need not ask amid a replica's replacement.
        """
        await asyncio.gather(*(_learn(pool) for pool in self._lasting))

    async def ready(self) -> bool:
        """Whether every pool that always has a replica has answered a prompt."""
        return all(await asyncio.gather(*(pool.client.ready() for pool in self._lasting)))

    def pools(self) -> list[PoolState]:
        """Every pool's state, by length, as this ingress sees it."""
        return [pool.state() for pool in self._pools]

    def load(self) -> ReplicaLoad | None:
        loads = [load for pool in self._pools if (load := pool.client.load()) is not None]
        return sum_loads(loads) if loads else None

    async def refresh_load(self) -> None:
        await asyncio.gather(*(pool.client.refresh_load() for pool in self._pools))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """As a pool's own; raises PoolBusy at the first step when there is no room for the request."""
        cost = cost_of(len(request.prompt_token_ids), request.params.max_tokens, request.stated_max_tokens)
        pool = self.admit(request, cost)
        name = request.request_id
        pool.loads.book(name, cost, prefix_of(request.prompt_token_ids))
        attempts = Attempts(request, pool.retry, time.monotonic)
        trail = current_answer()
        trail.pool = pool.spec.name
        try:
            while True:
                outputs = pool.client.generate(attempts.request)
                try:
                    if attempts.retrying:
                        trail.attempt = attempts.request.attempt + 1
                        first = await begin(outputs, attempts, lambda: bool(pool.loads.replica_of(name)))
                        pool.retries["resumed" if attempts.resuming else "restarted"] += 1
                        pool.loads.progress(name, len(first.token_ids))
                        attempts.took(first)
                        yield first
                    async for output in outputs:
                        pool.loads.progress(name, len(output.token_ids))
                        attempts.took(output)
                        yield output
                    return
                except PoolError as error:
                    pause = pool.after_failure(attempts, error)
                    if pause is None:
                        raise
                finally:
                    await outputs.aclose()
                await asyncio.sleep(pause)
        finally:
            trail.replica = pool.loads.replica_of(name) or ""
            pool.loads.end(name)

    def full(self, priority: Priority) -> PoolBusy | None:
        """The first pool's refusal when every pool would refuse even one token more."""
        refusals = [pool.admission.check(pool.loads.totals(), _LEAST, priority) for pool in self._pools]
        if None in refusals:
            return None
        self._pools[0].rejections[refusals[0].reason, priority] += 1
        return _busy(refusals[0])

    def admit(self, request: GenerationRequest, cost: Cost) -> RoutedPool:
        """The pool that takes the request, which is to be booked there. Raises PoolBusy when none does."""
        length = cost.prompt_tokens + (request.stated_max_tokens or 0)
        own = self._pools[bucket_of(self._specs, length)]
        totals = own.loads.totals()
        refusal = own.admission.check(totals, cost, request.priority)
        if refusal is not None or own.admission.load_share(totals, cost) > _BORROW_ABOVE:
            lender = self._lender(own, request, cost)
            if lender is not None:
                lender.decisions["borrowed"] += 1
                return lender
        if refusal is not None:
            own.rejections[refusal.reason, request.priority] += 1
            raise _busy(refusal)
        own.decisions["own"] += 1
        return own

    def _lender(self, own: RoutedPool, request: GenerationRequest, cost: Cost) -> RoutedPool | None:
        """The nearest longer pool that is idle enough to take the request, and has a replica up."""
        for name in own.spec.borrows:
            pool = self._by_name[name]
            totals = pool.loads.totals()
            idle = pool.admission.load_share(totals, cost) <= _LEND_BELOW
            if idle and totals.replicas and pool.admission.check(totals, cost, request.priority) is None:
                return pool
        return None


def _busy(refusal: Refusal) -> PoolBusy:
    return PoolBusy(refusal.message, refusal.retry_after_s, refusal.reason)
