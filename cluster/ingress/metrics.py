"""What Prometheus is told: the engine's load, and what clients of this ingress see.

Owns its registry, so that several ingresses can live in one process. Times are in seconds.
"""

import time
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridserve.cluster.ingress.errors import ApiError
from hybridserve.cluster.pool.interface import PoolClient
from hybridserve.cluster.routing.state import PoolState, RetryOutcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LOAD_GAUGES = (
    ("running", "hybridserve_requests_running", "Requests in the engine's batch"),
    ("waiting", "hybridserve_requests_waiting", "Requests that wait for the engine"),
    ("waiting_tokens", "hybridserve_tokens_waiting", "Tokens not yet computed"),
    ("units_used", "hybridserve_units_used", "State units in use"),
    ("units_total", "hybridserve_units_total", "State units there are"),
    ("pages_used", "hybridserve_pages_used", "KV pages in use"),
    ("pages_total", "hybridserve_pages_total", "KV pages there are"),
)

_POOL_GAUGES: tuple[tuple[Callable[[PoolState], float], str, str], ...] = (
    (lambda state: len(state.replicas), "hybridserve_pool_replicas", "Replicas that are up"),
    (lambda state: state.budget_tokens, "hybridserve_pool_budget_tokens", "Tokens that may be outstanding"),
    (lambda state: state.outstanding_tokens, "hybridserve_pool_outstanding_tokens", "Outstanding tokens"),
    (lambda state: state.queued_tokens, "hybridserve_pool_queued_tokens", "Tokens of prompts that wait"),
    (
        lambda state: state.max_queue_age_s,
        "hybridserve_pool_queue_age_seconds",
        "Since the oldest request without a first token was taken",
    ),
)


class EngineCollector(Collector):
    """The pool's last known load at the time of a scrape; nothing before the first report."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        load = self._pool.load()
        if load is None:
            return
        for field, name, text in _LOAD_GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(load, field))
        seconds = load.step_ms / 1e3
        yield GaugeMetricFamily("hybridserve_step_seconds", "Duration of the last step", value=seconds)
        yield CounterMetricFamily("hybridserve_preemptions", "Requests preempted", value=load.preemptions)
        yield CounterMetricFamily("hybridserve_steps", "Engine steps", value=load.steps)


class PoolCollector(Collector):
    """Every pool's state at the time of a scrape, as this ingress sees it."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        states = self._pool.pools()
        for read, name, text in _POOL_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["pool"])
            for state in states:
                gauge.add_metric([state.spec.name], read(state))
            yield gauge
        decisions = CounterMetricFamily(
            "hybridserve_router_decisions", "Requests sent to a pool", labels=["pool", "decision"]
        )
        rejections = CounterMetricFamily(
            "hybridserve_router_rejections",
            "Requests of a pool's bucket that were refused",
            labels=["pool", "reason", "priority"],
        )
        hits = CounterMetricFamily(
            "hybridserve_router_prefix_hits",
            "Requests sent to the replica that saw the prompt's beginning last",
            labels=["pool"],
        )
        retries = CounterMetricFamily(
            "hybridserve_retries", "Requests that a replica failed", labels=["pool", "outcome"]
        )
        for state in states:
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
        yield retries
        yield hits


class IngressMetrics:
    """Counters and histograms of one ingress replica."""

    def __init__(self, pool: PoolClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(pool))
        self._registry.register(PoolCollector(pool))
        self.in_flight = Gauge(
            "hybridserve_ingress_requests_in_flight", "Requests in this ingress", registry=self._registry
        )
        self.first_token = Histogram(
            "hybridserve_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "hybridserve_inter_token_latency_seconds",
            "Between two tokens of one answer",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "hybridserve_prompt_tokens", "Prompt tokens taken", registry=self._registry
        )
        self.generation_tokens = Counter(
            "hybridserve_generation_tokens", "Tokens generated", registry=self._registry
        )
        self._requests = Counter(
            "hybridserve_requests", "Answers that ended", ["finish_reason"], registry=self._registry
        )
        self._errors = Counter(
            "hybridserve_request_errors",
            "Requests answered with an error",
            ["status", "code"],
            registry=self._registry,
        )

    def count_answer(self, finish_reason: str) -> None:
        """One answer ended: "stop", "length", "error", or "cancelled" when the client left."""
        self._requests.labels(finish_reason).inc()

    def count_error(self, error: ApiError) -> None:
        self._errors.labels(str(error.status), error.code or "none").inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class AnswerClock:
    """Times and counts the tokens of one answer."""

    def __init__(self, metrics: IngressMetrics, arrival: float) -> None:
        """arrival: `time.monotonic` seconds."""
        self._metrics = metrics
        self._last = arrival
        self._started = False

    def tokens(self, count: int) -> None:
        """`count` tokens arrived just now, together."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if self._started:
            self._metrics.inter_token.observe(elapsed / count)
        else:
            self._started = True
            self._metrics.first_token.observe(elapsed)
        self._metrics.generation_tokens.inc(count)
