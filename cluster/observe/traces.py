"""OpenTelemetry spans of a request, made at its end from the times that were noted on the way.

Made afterwards because nothing inside needs a span's id while the request runs: the engine reports times, not
spans. So a request that is not sampled costs one look at its trace id, and without tracing nothing is called.
Attributes are those of the semantic conventions for generative AI; never a prompt or an answer.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from hybridserve.cluster.observe.trail import AnswerTrail, RequestTrail

SERVICE = "hybridserve"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
"""By route; requests without answers have a root span alone."""


class RequestTracer:
    """Makes one trace of each finished request.

    Args:
        model: what clients call it.
        processor: where spans go.
        sampling_ratio: of the requests that do not say themselves whether they are traced.
        resource: attributes of this process beside the service's name.
    """

    def __init__(
        self,
        model: str,
        processor: SpanProcessor,
        sampling_ratio: float = 1.0,
        resource: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling_ratio)),
            resource=Resource.create({"service.name": SERVICE, **(resource or {})}),
            shutdown_on_exit=True,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trail: RequestTrail) -> str:
        """Make the request's spans; returns the trace's id in hex, "" when it is not sampled."""
        assert trail.ended is not None
        carrier = {"traceparent": trail.traceparent, "tracestate": trail.tracestate}
        root = self._tracer.start_span(
            f"{trail.method} {trail.route}",
            context=self._propagator.extract(carrier) if trail.traceparent else None,
            kind=SpanKind.SERVER,
            start_time=_ns(trail, trail.began),
            attributes={"http.request.method": trail.method, "http.route": trail.route},
        )
        if not root.is_recording():
            return ""
        root.set_attribute("hybridserve.request_id", trail.request_id)
        if trail.status:
            root.set_attribute("http.response.status_code", trail.status)
        if trail.status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        for name, begin, end in trail.phases:
            self._span(trail, name, root, begin, end)
        for answer in trail.answers:
            self._record_answer(trail, answer, root)
        root.end(_ns(trail, trail.ended))
        return trace.format_trace_id(root.get_span_context().trace_id)

    def shut_down(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _record_answer(self, trail: RequestTrail, answer: AnswerTrail, root: Span) -> None:
        operation = OPERATIONS.get(trail.route, "text_completion")
        end = answer.ended or trail.ended
        assert end is not None
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=trace.set_span_in_context(root),
            kind=SpanKind.INTERNAL,
            start_time=_ns(trail, answer.sent),
            attributes={"gen_ai.operation.name": operation, **self._attributes(trail, answer)},
        )
        if answer.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", "pool_error")
        scheduled = trail.scheduled(answer)
        # what was not reported took no time of its own: prefill then begins where the answer does
        begun = answer.sent if scheduled is None else scheduled
        if scheduled is not None:
            self._span(trail, "queue", span, answer.sent, scheduled)
        if answer.first_token is not None:
            self._span(trail, "prefill", span, begun, answer.first_token)
            self._span(trail, "decode", span, answer.first_token, end)
        span.end(_ns(trail, end))

    def _attributes(self, trail: RequestTrail, answer: AnswerTrail) -> dict[str, AttributeValue]:
        params = answer.params
        known: dict[str, AttributeValue | None] = {
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.stream": trail.streamed,
            "gen_ai.request.max_tokens": params.max_tokens if params else None,
            "gen_ai.request.temperature": params.temperature if params else None,
            "gen_ai.request.top_p": params.top_p if params else None,
            "gen_ai.request.seed": params.seed if params else None,
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": answer.generation_tokens,
            "gen_ai.response.finish_reasons": (answer.finish_reason,) if answer.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": (
                answer.first_token - trail.began if answer.first_token is not None else None
            ),
            "hybridserve.pool": answer.pool or None,
            "hybridserve.replica": answer.replica or None,
            "hybridserve.attempt": answer.attempt,
            "hybridserve.preemptions": answer.preemptions,
        }
        # a seed may have 64 bits without a sign, an attribute 63
        return {name: value for name, value in known.items() if value is not None and not _too_large(value)}

    def _span(self, trail: RequestTrail, name: str, parent: Span, begin: float, end: float) -> None:
        span = self._tracer.start_span(
            name, context=trace.set_span_in_context(parent), start_time=_ns(trail, begin)
        )
        span.end(_ns(trail, end))


def otlp_processor(endpoint: str | None) -> SpanProcessor:
    """Sends spans in batches to an OpenTelemetry collector, over HTTP.

    endpoint: like "http://collector:4318/v1/traces"; None: what OpenTelemetry's environment variables say.

    Raises:
        ValueError: the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ValueError(
            "tracing.exporter: otlp needs the OpenTelemetry exporter; install hybridserve[otlp]"
        ) from None
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _ns(trail: RequestTrail, moment: float) -> int:
    return int(trail.wall(moment) * 1e9)


def _too_large(value: AttributeValue) -> bool:
    return isinstance(value, int) and value >= 2**63
