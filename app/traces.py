"""OpenTelemetry spans of what is generated: each request, and in it the queue, prefill and decode of each answer.

Spans are made when a request has ended, from times that were taken anyway, so they cost the tokens nothing. They hold
numbers, and names that this server gave; no text of a prompt or an answer. The library, an extra, is imported here and
only where its own variables ask for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.delivery import CLIENT_GONE, COMPLETION, FACTS
from app.completion import Choice, Completion

log = logging.getLogger("mlxcel.traces")

PREFIX = "OTEL_"  # of the variables that the library reads
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/completion": "text_completion",
    "/completions": "text_completion",
    "/infill": "text_completion",
}


def are_asked_for(variables: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's ``variables`` name a collector, or the kind of one, and do not turn traces off."""
    kind = variables.get("OTEL_TRACES_EXPORTER")
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or kind not in (None, "otlp"):
        return False
    return kind == "otlp" or not variables.keys().isdisjoint(
        {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
    )


class Phase(NamedTuple):
    """A part of an answer's life, from and to on the monotonic clock in seconds."""

    name: str
    from_s: float
    to_s: float


def phases(choice: Choice, ended_s: float) -> Iterator[Phase]:
    """What an answer went through. A phase that it did not leave ends with the request, at ``ended_s``."""
    times = choice.token_times_s
    yield Phase("queue", choice.arrived_s, ended_s if choice.admitted_s is None else choice.admitted_s)
    if choice.admitted_s is not None:
        yield Phase("prefill", choice.admitted_s, times[0] if times else ended_s)
    if times:
        yield Phase("decode", times[0], times[-1])


class Traced:
    """An application, with a span for each request that asks it to generate."""

    def __init__(self, app: ASGIApp, version: str) -> None:
        """Where spans go, and which, is in the library's variables. Raises ImportError where it is not installed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._app = app
        # What the variables say of the service beats what is said here.
        service = {"service.name": "mlxcel", "service.version": version, **OTELResourceDetector().detect().attributes}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("mlxcel", version)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.monotonic()
        status, request_id = CLIENT_GONE, ""

        async def send_seen(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = Headers(raw=message["headers"]).get("x-request-id", "")
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            if scope.get("method") == "POST" and _route(scope) in OPERATIONS:
                self._record(scope, began_s, status, request_id)

    def _record(self, scope: Scope, began_s: float, status: int, request_id: str) -> None:
        """Make the span of a request that has ended, and those in it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_s = time.monotonic()
        since_ns = time.time_ns() - int(ended_s * 1e9)  # where the monotonic clock began, in ns since 1970

        def moment(monotonic_s: float) -> int:
            return since_ns + int(monotonic_s * 1e9)

        facts: dict[str, Any] = scope.get(FACTS, {})
        span = self._tracer.start_span(
            f"POST {_route(scope)}",
            TraceContextTextMapPropagator().extract(dict(Headers(scope=scope))),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": _route(scope),
                "http.response.status_code": status,
                "mlxcel.request_id": request_id,
                "gen_ai.operation.name": OPERATIONS[_route(scope)],
                **_of_answer(facts),
            },
            start_time=moment(began_s),
        )
        if status >= 500 or facts.get("finish_reason") == "error":
            span.set_status(Status(StatusCode.ERROR))
        completion: Completion | None = scope.get(COMPLETION)
        for choice in completion.choices if completion else ():
            for phase in phases(choice, ended_s):
                self._tracer.start_span(
                    phase.name,
                    set_span_in_context(span),
                    attributes={"mlxcel.choice": choice.index},
                    start_time=moment(phase.from_s),
                ).end(moment(phase.to_s))
        span.end(moment(ended_s))

    def close(self, timeout_s: float) -> None:
        """Send what has not been sent yet, for at most so long: a collector that is away must not hold the process."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(timeout_s)


def traced(app: ASGIApp, version: str, variables: Mapping[str, str]) -> Traced | None:
    """``app`` with spans, where ``variables`` ask for them and the library is there."""
    if not are_asked_for(variables):
        return None
    try:
        found = Traced(app, version)
    except ImportError as error:
        log.warning("there are no traces, whatever OTEL_* says: %s; the extra `otel` has it", error)
        return None
    log.info("traces are sent as OTEL_* says")
    return found


def _of_answer(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the access log, by the names that OpenTelemetry has for them."""
    if not facts:
        return {}  # refused before there was anything to answer
    return {
        "gen_ai.usage.input_tokens": facts["prompt_tokens"],
        "gen_ai.usage.output_tokens": facts["completion_tokens"],
        "gen_ai.response.finish_reasons": [facts["finish_reason"]],
        "mlxcel.cached_tokens": facts["cached_tokens"],
    }


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "")
