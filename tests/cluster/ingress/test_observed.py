"""The log line and the trace of a request that went through the whole HTTP application."""

import json
import logging
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hybridserve.cluster.ingress.service import Observers
from hybridserve.cluster.observe.logs import JsonFormatter
from hybridserve.cluster.observe.traces import RequestTracer
from hybridserve.cluster.pool.interface import PoolError

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict]]:
    """The requests' lines so far, as JSON."""
    name = "hybridserve.cluster.ingress.observed"
    caplog.set_level(logging.DEBUG, name)

    def read() -> list[dict]:
        formatter = JsonFormatter({})
        return [json.loads(formatter.format(record)) for record in caplog.records if record.name == name]

    return read


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(make_caller, exporter: InMemorySpanExporter) -> Callable:
    """traced(sampling_ratio): a caller of a traced application."""

    def make(sampling_ratio: float = 1.0):
        tracer = RequestTracer("demo", SimpleSpanProcessor(exporter), sampling_ratio)
        return make_caller(observers=Observers(tracer=tracer))

    return make


def test_one_line_for_a_request_with_its_id_everywhere(caller, pool, lines) -> None:
    headers = {"x-request-id": "client-7", "x-hybridserve-priority": "low"}
    body = {"prompt": "a secret prompt", "max_tokens": 3, "n": 2, "ignore_eos": True}
    answer = caller.request("POST", "/v1/completions", body=body, headers=headers)
    assert answer.headers["x-request-id"] == "client-7"
    assert [request.client_request_id for request in pool.submitted] == ["client-7"] * 2
    [line] = lines()
    usage = answer.json()["usage"]
    assert (line["request_id"], line["event"], line["level"]) == ("client-7", "request", "info")
    assert (line["route"], line["method"], line["status"]) == ("/v1/completions", "POST", 200)
    assert (line["pool"], line["priority"], line["answers"], line["stream"]) == ("only", "low", 2, False)
    assert line["prompt_tokens"] == 2 * usage["prompt_tokens"]
    assert line["generation_tokens"] == usage["completion_tokens"] == 6
    assert line["finish_reason"] == "length"
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert "secret" not in json.dumps(line) and pool.answer(pool.submitted[0])


def test_an_id_is_made_when_the_client_has_none_or_a_strange_one(caller, lines) -> None:
    made = caller.get("/v1/models").headers["x-request-id"]
    odd = caller.request("GET", "/v1/models", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert [line["request_id"] for line in lines()] == [made, odd]
    assert len(made) == len(odd) == 32


def test_behind_a_server_that_names_requests(make_caller, lines) -> None:
    caller = make_caller(name_requests=False)
    answer = caller.request("GET", "/v1/models", headers={"x-request-id": "a b" + "c" * 200})
    assert "x-request-id" not in answer.headers
    assert lines()[0]["request_id"] == "a?b" + "c" * 125


def test_lines_of_errors_and_of_what_machines_ask(caller, pool, lines) -> None:
    caller.get("/health")
    caller.get("/etc/passwd")
    pool.failures = {0: PoolError("gone")}
    caller.post("/generate", {"prompt": "a"})
    health, missing, failed = lines()
    assert (health["level"], health["route"]) == ("debug", "/health")
    # paths that clients make up must not become as many routes
    assert (missing["status"], missing["route"], missing["level"]) == (404, "other", "info")
    assert (failed["status"], failed["level"], failed["finish_reason"]) == (503, "warning", "error")


def test_a_stream_that_breaks_says_so_though_its_status_was_200(caller, pool, lines) -> None:
    pool.failures = {2: PoolError("gone")}
    caller.post("/generate", {"prompt": "a", "stream": True})
    [line] = lines()
    assert (line["status"], line["stream"], line["finish_reason"]) == (200, True, "error")
    assert line["generation_tokens"] == 2


def test_a_trace_goes_on_from_the_clients(traced, pool, exporter, lines) -> None:
    pool.scheduled_after = 0.002
    pool.step_seconds = 0.005
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r-9"}
    body = {
        "messages": [{"role": "user", "content": "a secret"}],
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 2**64 - 1,
    }
    answer = traced().request("POST", "/v1/chat/completions", body=body, headers=headers).json()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/chat/completions", "tokenize", "chat demo", "queue", "prefill", "decode"}
    root, chat = spans["POST /v1/chat/completions"], spans["chat demo"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    assert lines()[0]["trace_id"] == TRACE
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["hybridserve.request_id"] == "r-9"
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.model"] == "demo"
    assert chat.attributes["gen_ai.request.temperature"] == 0.5
    # no attribute holds 64 bits
    assert "gen_ai.request.seed" not in chat.attributes
    assert chat.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == 3
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert chat.attributes["hybridserve.pool"] == "only"
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {chat.context.span_id}
    assert chat.parent.span_id == spans["tokenize"].parent.span_id == root.context.span_id
    assert root.start_time <= spans["tokenize"].start_time <= chat.start_time == queue.start_time
    assert queue.end_time == prefill.start_time < prefill.end_time == decode.start_time < decode.end_time
    assert queue.end_time - queue.start_time >= 1e6
    assert decode.end_time == chat.end_time <= root.end_time
    assert "secret" not in " ".join(span.to_json() for span in spans.values())


def test_an_engines_clock_cannot_turn_a_span_round(traced, pool, exporter) -> None:
    for ahead in (-1000.0, 1000.0):
        pool.scheduled_after = ahead
        traced().post("/generate", {"prompt": "a", "max_tokens": 2})
    assert len(exporter.get_finished_spans()) == 2 * 6
    assert all(span.start_time <= span.end_time for span in exporter.get_finished_spans())


def test_failures_are_errors_in_a_trace(traced, pool, exporter) -> None:
    pool.failures = {0: PoolError("gone")}
    traced().post("/generate", {"prompt": "a"})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert not spans["POST /generate"].status.is_ok
    assert not spans["text_completion demo"].status.is_ok
    # nothing was computed that had a time
    assert not {"queue", "prefill", "decode"} & spans.keys()


def test_what_is_not_sampled_is_not_traced(traced, exporter, lines) -> None:
    caller = traced(0.0)
    caller.post("/generate", {"prompt": "a"})
    assert not exporter.get_finished_spans() and "trace_id" not in lines()[0]
    # the client's own decision counts for more
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    caller.request("POST", "/generate", body={"prompt": "a"}, headers=headers)
    assert exporter.get_finished_spans()
    exporter.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    traced(1.0).request("POST", "/generate", body={"prompt": "a"}, headers=headers)
    assert not exporter.get_finished_spans()
