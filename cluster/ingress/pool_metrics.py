"""What the pools say of themselves, read at a scrape: their replicas' load, and the router's decisions."""

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridserve.cluster.pool.interface import PoolClient
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.state import PoolState, RetryOutcome

UNNAMED_REPLICA = "unnamed"
"""Without the token bus a load comes without its replica's name."""

_REPLICA_GAUGES: tuple[tuple[Callable[[ReplicaLoad], float], str, str], ...] = (
    (lambda load: load.running, "requests_running", "Requests in the engine's batch"),
    (lambda load: load.waiting, "requests_waiting", "Requests that wait for the engine"),
    (lambda load: load.waiting_tokens, "tokens_waiting", "Tokens of the engine's requests not yet computed"),
    (lambda load: load.units_used, "units_used", "State units in use"),
    (lambda load: load.units_total, "units_limit", "State units that could be in use at once"),
    (lambda load: load.pages_used, "pages_used", "KV pages in use"),
    (lambda load: load.pages_total, "pages_limit", "KV pages that could be in use at once"),
    (lambda load: load.free_extents, "free_extents", "Extents of the arena that are leased to nobody"),
    (lambda load: load.arena_use, "arena_use_ratio", "Share of the arena that is in use"),
    (lambda load: load.queue_age_s, "queue_age_seconds", "Age of the oldest waiting request"),
    (lambda load: load.step_ms / 1e3, "step_seconds", "Duration of the last step"),
)
_REPLICA_COUNTERS: tuple[tuple[Callable[[ReplicaLoad], float], str, str], ...] = (
    (lambda load: load.preemptions, "preemptions", "Requests preempted"),
    (lambda load: load.steps, "steps", "Engine steps"),
    (lambda load: load.progressed_tokens, "computed_tokens", "Tokens computed, of prompts and answers"),
)
_POOL_GAUGES: tuple[tuple[Callable[[PoolState], float | None], str, str], ...] = (
    (lambda state: len(state.replicas), "replicas", "Replicas that are up"),
    (lambda state: state.spec.replicas.min, "replicas_min", "Replicas that there are at least to be"),
    (lambda state: state.spec.replicas.max, "replicas_max", "Replicas that there may be at most"),
    (
        lambda state: len(state.replicas) * state.spec.tensor_parallel_size,
        "shards",
        "Shards that are up; on GPUs, one each",
    ),
    (lambda state: state.budget_tokens, "budget_tokens", "Tokens that may be outstanding"),
    (lambda state: state.outstanding_tokens, "outstanding_tokens", "Outstanding tokens"),
    (lambda state: state.queued_tokens, "queued_tokens", "Tokens of prompts that wait for a first token"),
    (
        lambda state: state.max_queue_age_s,
        "queue_age_seconds",
        "Age of the oldest waiting request",
    ),
    (lambda state: state.queue_wait_s, "queue_wait_seconds", "What a request of now would wait"),
    (
        lambda state: state.tokens_per_s,
        "tokens_per_second",
        "Pace of all its replicas together",
    ),
)


class PoolCollector(Collector):
    """Every pool and every replica; all ingress replicas say the same of them, but for a moment's delay."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        states = self._pool.pools()
        for read, name, text in _POOL_GAUGES:
            gauge = GaugeMetricFamily(f"hybridserve_pool_{name}", text, labels=["pool"])
            for state in states:
                value = read(state)
                if value is not None:
                    gauge.add_metric([state.spec.name], value)
            yield gauge
        loads = [(state.spec.name, name, load) for state in states for name, load in _loads(state)]
        for kind, readers in ((GaugeMetricFamily, _REPLICA_GAUGES), (CounterMetricFamily, _REPLICA_COUNTERS)):
            for read_load, name, text in readers:
                family = kind(f"hybridserve_{name}", text, labels=["pool", "replica"])
                for pool, replica, load in loads:
                    family.add_metric([pool, replica], read_load(load))
                yield family


class RouterCollector(Collector):
    """What this ingress' router has decided."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "hybridserve_router_decisions", "Answers sent to a pool", labels=["pool", "decision"]
        )
        rejections = CounterMetricFamily(
            "hybridserve_router_rejections",
            "Answers of a pool's bucket that were refused",
            labels=["pool", "reason", "priority"],
        )
        hits = CounterMetricFamily(
            "hybridserve_router_prefix_hits",
            "Answers sent to the replica that saw the prompt's beginning last",
            labels=["pool"],
        )
        retries = CounterMetricFamily(
            "hybridserve_retries", "Answers that a replica failed", labels=["pool", "outcome"]
        )
        for state in self._pool.pools():
            name = state.spec.name
            for outcome in get_args(RetryOutcome):
                retries.add_metric([name, outcome], state.retries.get(outcome, 0))
            for decision in ("own", "borrowed"):
                decisions.add_metric([name, decision], state.decisions.get(decision, 0))
            for (reason, priority), count in state.rejections.items():
                rejections.add_metric([name, reason, priority], count)
            hits.add_metric([name], state.prefix_hits)
        yield decisions
        yield rejections
        yield hits
        yield retries


def _loads(state: PoolState) -> list[tuple[str, ReplicaLoad]]:
    named = [(replica.name, replica.load) for replica in state.replicas if replica.load is not None]
    if not named and state.unnamed_load is not None:
        return [(UNNAMED_REPLICA, state.unnamed_load)]
    return named
