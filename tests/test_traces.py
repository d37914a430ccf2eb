"""Spans of real requests, as a collector gets them over HTTP; and nothing of it where nobody asks."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app.completion import Choice
from app.request import Request
from app.text.dialect import PLAIN
from app.traces import Phase, are_asked_for, phases
from tests.serving import ServerProcess, serving
from tests.talking import VOCABULARY

ROOT = Path(__file__).parent.parent
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SECRET = "zyzzyva"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    """Takes what an exporter sends, as the OpenTelemetry collector does: protobuf by POST on /v1/traces."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        with self.news:
            self.bodies.append(body)
            self.news.notify_all()

    def requests(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def resources(self) -> list[dict[str, Any]]:
        return [attributes_of(group.resource) for request in self.requests() for group in request.resource_spans]

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests()
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, num_spans: int) -> list[Any]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.spans()) >= num_spans, 30), [span.name for span in self.spans()]
        return self.spans()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                found.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200 if is_right else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as http:
        found.url = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield found
        http.shutdown()


@pytest.fixture(scope="module")
def watched(
    collector: Collector, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that sends its spans to the collector."""
    pytest.importorskip("opentelemetry.sdk", reason="the SDK is not installed: it is in the extra `otel`")
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINT, collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        with serving(folder, MODEL=str(tiny_model_dir), CACHE_DIR=str(folder)) as process:
            yield process


@pytest.fixture
def fresh(collector: Collector) -> Collector:
    collector.bodies.clear()
    return collector


def attributes_of(thing: Any) -> dict[str, Any]:
    kinds = {"string_value": str, "int_value": int}

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return (
            [plain(inner) for inner in value.array_value.values]
            if kind == "array_value"
            else kinds[kind](getattr(value, kind))
        )

    return {entry.key: plain(entry.value) for entry in thing.attributes}


def test_a_request_its_queue_prefill_and_decode(watched: ServerProcess, fresh: Collector) -> None:
    body = {"prompt": f"Say {SECRET}.", "max_tokens": 5, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine-1"}
    used = watched.post("/v1/completions", body, headers=headers).json()["usage"]
    spans = {span.name: span for span in fresh.wait_for(4)}
    assert spans.keys() == {"POST /v1/completions", "queue", "prefill", "decode"}
    root = spans.pop("POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "vendor=1")
    assert root.kind == root.SPAN_KIND_SERVER
    assert attributes_of(root) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "mlxcel.request_id": "mine-1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": used["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "mlxcel.cached_tokens": 0,
    }
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert attributes_of(span) == {"mlxcel.choice": 0}
    queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
    assert root.start_time_unix_nano <= queue.start_time_unix_nano
    assert abs(queue.end_time_unix_nano - prefill.start_time_unix_nano) < 1000
    assert abs(prefill.end_time_unix_nano - decode.start_time_unix_nano) < 1000
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano
    (resource, *_) = fresh.resources()
    assert resource["service.name"] == "mlxcel"
    assert resource["deployment.environment.name"] == "test"
    assert all(SECRET.encode() not in sent for sent in fresh.bodies), "a span has text of the prompt"


def test_each_answer_has_its_own_phases_and_a_stream_is_one_request(watched: ServerProcess, fresh: Collector) -> None:
    message = {"role": "user", "content": SECRET}
    body = {"messages": [message], "max_tokens": 4, "ignore_eos": True, "n": 2, "stream": True}
    assert watched.post("/v1/chat/completions", body).text.endswith("data: [DONE]\n\n")
    spans = fresh.wait_for(7)
    (root,) = [span for span in spans if span.name == "POST /v1/chat/completions"]
    assert root.parent_span_id == b""
    assert sorted((span.name, attributes_of(span)["mlxcel.choice"]) for span in spans if span is not root) == [
        (name, choice) for name in ("decode", "prefill", "queue") for choice in (0, 1)
    ]
    assert all(SECRET.encode() not in sent for sent in fresh.bodies)


def test_what_is_refused_is_a_span_too_and_what_does_not_generate_is_none(
    watched: ServerProcess, fresh: Collector
) -> None:
    assert watched.http.get("/slots").status_code == 200
    assert watched.post("/tokenize", {"content": "x"}).status_code == 200
    assert watched.post("/v1/completions", {"prompt": "x", "temperature": 9}).status_code == 400
    (span,) = fresh.wait_for(1)
    assert attributes_of(span)["http.response.status_code"] == 400
    assert span.status.code == span.status.STATUS_CODE_UNSET  # the client's fault


def test_a_client_that_samples_nothing_gets_no_span(watched: ServerProcess, fresh: Collector) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    watched.post("/v1/completions", body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    watched.post("/v1/completions", body, headers={"traceparent": "nonsense"})
    fresh.wait_for(3)
    assert TRACE not in {span.trace_id.hex() for span in fresh.spans()}


def test_the_last_spans_are_sent_before_the_end_and_an_absent_collector_does_not_hold_it(
    fresh: Collector, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the SDK is not installed: it is in the extra `otel`")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    for url, num_spans in ((fresh.url, 4), ("http://127.0.0.1:9", 0)):
        fresh.bodies.clear()
        monkeypatch.setenv(ENDPOINT, url)
        with serving(tmp_path, MODEL=str(tiny_model_dir), CACHE_DIR=str(tmp_path)) as server:
            server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
            assert fresh.bodies == []
            assert server.signal_and_wait(signal.SIGTERM, 10) == 0
            assert len(fresh.spans()) == num_spans
            assert SECRET not in server.log.read_text()


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({ENDPOINT: "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "True", ENDPOINT: "http://x"}, False),
    ],
)
def test_when_traces_are_asked_for(variables: dict[str, str], asked: bool) -> None:
    assert are_asked_for(variables) is asked


def test_phases_end_where_the_request_does() -> None:
    choice = Choice(0, Request(1, [1], 1, 5, arrival_s=1.0), VOCABULARY, (), False, PLAIN.reader((), ""))
    assert list(phases(choice, 9.0)) == [Phase("queue", 1.0, 9.0)]
    choice.admitted_s = 2.0
    assert list(phases(choice, 9.0)) == [Phase("queue", 1.0, 2.0), Phase("prefill", 2.0, 9.0)]
    choice.token_times_s = [3.0, 4.0]
    assert list(phases(choice, 9.0))[1:] == [Phase("prefill", 2.0, 3.0), Phase("decode", 3.0, 4.0)]


def test_nothing_of_it_is_imported_unasked_and_its_absence_is_a_warning() -> None:
    program = """
import logging, sys
from app.traces import traced
import app.runtime
assert traced(None, "0", {}) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.modules["opentelemetry"] = None  # as if it were not installed
logging.basicConfig(format="%(message)s")
assert traced(None, "0", {"OTEL_TRACES_EXPORTER": "otlp"}) is None
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "the extra `otel`" in done.stderr
