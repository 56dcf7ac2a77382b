"""Sends spans of requests to OpenTelemetry: the extra `otel`. Imported only if they are enabled.

A span is created after its request has ended, from the log line, so nothing is added to the path of
a token. It continues the caller's trace if the request has a W3C `traceparent`. Names of
attributes: OpenTelemetry's semantic conventions for HTTP and generative models, and vLLM's for
latencies.
"""

from collections.abc import Mapping
from time import monotonic, time_ns
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from forerun import __version__
from forerun.serve.answers.record import RequestRecord

_BILLION = 1_000_000_000
SHUTDOWN_MILLISECONDS = 3000
"""Time to send the last spans when the server ends."""


class RequestTraces:
    """Sends a span per request to a collector, in batches, from its own thread.

    endpoint  the collector's address for OTLP over HTTP, such as http://localhost:4318; without a
              path, /v1/traces is used
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "forerun", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=_with_path(endpoint)))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("forerun.serve")
        self._propagator = TraceContextTextMapPropagator()

    def ended(
        self, record: RequestRecord, method: str, path: str, headers: Mapping[str, str]
    ) -> None:
        """Create the span of a request that has just ended, as a child of the one that its headers
        name. Never blocks.
        """
        seconds = monotonic() - record.began
        end = time_ns()
        start = end - int(seconds * _BILLION)
        span = self._tracer.start_span(
            f"{method} {record.route or path}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            _attributes(record, method, path),
            start_time=start,
        )
        first = record.first_seconds()
        if first is not None:
            span.add_event("first_token", timestamp=start + int(first * _BILLION))
        if record.status is None or record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.note))
        span.end(end)

    def close(self) -> None:
        """Send what is left, for SHUTDOWN_MILLISECONDS at most, and create no more spans."""
        self._processor.force_flush(SHUTDOWN_MILLISECONDS)
        self._provider.shutdown()


def _attributes(record: RequestRecord, method: str, path: str) -> dict[str, Any]:
    found = {
        "http.request.method": method,
        "url.path": path,
        "http.response.status_code": record.answered(),
        "forerun.request.id": record.id,
        "gen_ai.provider.name": "forerun",
    }
    if record.model:
        found |= dict.fromkeys(("gen_ai.request.model", "gen_ai.response.model"), record.model)
    if record.route:
        found["http.route"] = record.route
    if record.answered() >= 400:
        found["error.type"] = record.note.partition(" ")[0] or str(record.answered())
    names = {
        "in": "gen_ai.usage.input_tokens",
        "out": "gen_ai.usage.output_tokens",
        "ttft_ms": "gen_ai.latency.time_to_first_token",
        "accept": "forerun.acceptance_length",
    }
    values = record.fields()
    found |= {names[key]: value for key, value in values.items() if key in names}
    if "ttft_ms" in values:  # In seconds, as vLLM has it.
        found[names["ttft_ms"]] = values["ttft_ms"] / 1000
    if record.session is not None:
        found["gen_ai.operation.name"] = "chat" if "chat" in path else "text_completion"
        stats = record.session.tally.stats
        found["forerun.draft_tokens"] = sum(one.draft_tokens for one in stats)
        found["forerun.accepted_draft_tokens"] = sum(one.accepted for one in stats)
    return found


def _with_path(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
