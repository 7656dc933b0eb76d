"""Traces reach a collector as OTLP over HTTP."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hybridserve.cluster.observe.traces import RequestTracer, otlp_processor
from hybridserve.cluster.observe.trail import RequestTrail


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Its endpoint, and what it was sent."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def test_spans_reach_a_collector(collector) -> None:
    endpoint, taken = collector
    tracer = RequestTracer("demo", otlp_processor(endpoint), resource={"service.instance.id": "i-1"})
    trail = RequestTrail(request_id="r-1", method="GET", route="/health", status=200)
    trail.ended = trail.began + 0.25
    trace_id = tracer.record(trail)
    tracer.shut_down()
    [resource_spans] = taken[0].resource_spans
    resource = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("hybridserve", "i-1")
    [span] = resource_spans.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("GET /health", trace_id)
    assert abs(span.end_time_unix_nano - span.start_time_unix_nano - 0.25e9) < 1e6
