"""What this ingress counts of its clients' requests, by pool. Times are in seconds.

Owns its registry, so that several ingresses can live in one process. What pools say of themselves is in
`pool_metrics`, and how several ingress replicas answer one scrape in `exposition`.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from hybridserve.cluster.ingress.errors import ApiError
from hybridserve.cluster.ingress.exposition import Snapshot, merge, snapshot
from hybridserve.cluster.ingress.fast_metrics import FastCounter, FastHistogram
from hybridserve.cluster.ingress.pool_metrics import PoolCollector, RouterCollector
from hybridserve.cluster.observe.trail import current_request, new_answer
from hybridserve.cluster.pool.interface import GenerationRequest, PoolClient
from hybridserve.replicas.engine.plan import EngineOutput

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_NO_POOL = "none"
"""The pool of what no pool took."""
_REJECTED = "rejected"


class IngressMetrics:
    """Counters and histograms of one ingress replica.

    Args:
        ingress: the replica's name, a label of all that it counts itself.
    """

    def __init__(self, pool: PoolClient, ingress: str = "ingress") -> None:
        self._ingress = ingress
        # what all ingress replicas say alike
        self._shared = CollectorRegistry()
        self._shared.register(PoolCollector(pool))
        self._own = CollectorRegistry()
        self._own.register(RouterCollector(pool))
        self.in_flight = Gauge(
            "hybridserve_ingress_requests_in_flight",
            "Generation requests in this ingress replica",
            registry=self._own,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency", "Between two tokens of one answer", _INTER_TOKEN_BUCKETS
        )
        self.queue_time = self._histogram(
            "queue_time", "From sending an answer to a replica until its engine began", _FIRST_TOKEN_BUCKETS
        )
        self.duration = self._histogram(
            "request_duration", "From a request's arrival to its answer's end", _REQUEST_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that pools have taken", "pool")
        self.generation_tokens = FastCounter(
            "hybridserve_generation_tokens", "Tokens generated", ["pool"], registry=self._own
        )
        self._requests = self._counter("requests", "Answers that ended", "pool", "finish_reason")
        self._errors = self._counter(
            "request_errors", "Requests answered with an error, or ended by one", "status", "code"
        )
        self._http = self._counter("http_requests", "HTTP requests that ended", "route", "status")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> FastHistogram:
        name = f"hybridserve_{name}_seconds"
        return FastHistogram(name, text, ["pool"], buckets=buckets, registry=self._own)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hybridserve_{name}", text, labels, registry=self._own)

    def count_answer(self, pool: str, finish_reason: str) -> None:
        """One answer ended: "stop", "length", "error", "cancelled" when the client left, or "rejected"."""
        self._requests.labels(pool or _NO_POOL, finish_reason).inc()

    def count_error(self, error: ApiError) -> None:
        self._errors.labels(str(error.status), error.code or "none").inc()

    def count_http(self, route: str, status: int) -> None:
        """status: 0 when the client left before it was told one."""
        self._http.labels(route, str(status or "cancelled")).inc()

    def snapshot(self) -> Snapshot:
        """All of it as plain data, to be put together with other ingress replicas'."""
        return snapshot(self._ingress, self._shared, self._own)

    def render(self, others: list[Snapshot] | None = None) -> bytes:
        """The text of a scrape, of this ingress replica and `others`."""
        return merge([self.snapshot(), *(others or [])])


class AnswerClock:
    """Times and counts one answer, for metrics and for the request's trail.

    Args:
        arrival: of the client's request, `time.monotonic` seconds.
        counts_prompt: of several answers to one prompt one counts its tokens.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        metrics: IngressMetrics,
        request: GenerationRequest,
        arrival: float,
        counts_prompt: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrival = self._last = arrival
        self._counts_prompt = counts_prompt
        self._trail = new_answer(len(request.prompt_token_ids), request.params, request.priority)

    def news(self, output: EngineOutput) -> None:
        """The pool has said something; at first that it has the request."""
        trail, metrics = self._trail, self._metrics
        pool = trail.pool or _NO_POOL
        self._count_prompt(pool)
        trail.preemptions = max(trail.preemptions, output.num_preemptions)
        count = len(output.token_ids)
        if output.first_scheduled_time and output.first_index == 0 and count == 1:
            # an engine's actor puts this output's time, and no other's, on the wall clock
            trail.scheduled = output.first_scheduled_time
        if not count:
            return
        now = self._clock()
        elapsed, self._last = now - self._last, now
        if trail.first_token is None:
            trail.first_token = now
            metrics.first_token.labels(pool).observe(elapsed)
            begun = current_request().scheduled(trail)
            if begun is not None:
                metrics.queue_time.labels(pool).observe(begun - trail.sent)
            # resolved once: each answer has many tokens
            self._inter_token = metrics.inter_token.labels(pool)
            self._generated = metrics.generation_tokens.labels(pool)
        else:
            self._inter_token.observe(elapsed / count)
        trail.generation_tokens += count
        self._generated.inc(count)

    def end(self, finish_reason: str) -> None:
        """The answer is over: "stop", "length", "error" or "cancelled"."""
        trail = self._trail
        trail.ended = self._clock()
        trail.finish_reason = finish_reason if trail.pool else _REJECTED
        self._metrics.count_answer(trail.pool, trail.finish_reason)
        if not trail.pool:
            return
        # the client may have left before the pool said anything
        self._count_prompt(trail.pool)
        self._metrics.duration.labels(trail.pool).observe(trail.ended - self._arrival)

    def _count_prompt(self, pool: str) -> None:
        if self._counts_prompt:
            self._counts_prompt = False
            self._metrics.prompt_tokens.labels(pool).inc(self._trail.prompt_tokens)
