"""Spans of requests, as OpenTelemetry's own collector side reads them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from starlette.testclient import TestClient

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import StatusCode

from forerun.build.engine import load
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """An HTTP server that keeps the spans it is sent, and where it listens."""
    spans, paths = [], []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            paths.append(self.path)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans, paths
    server.shutdown()
    server.server_close()


def values(span):
    kinds = {a.key: a.value for a in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in kinds.items()}


def test_a_span_per_request_continues_the_callers_trace(collector):
    endpoint, spans, paths = collector
    settings = ServeSettings(otlp_traces_endpoint=endpoint)
    loaded = load(EngineConfig(model="toy"))
    with TestClient(create_app(loaded, settings), base_url="http://localhost") as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
        assert client.get("/health").status_code == 200
    assert set(paths) == {"/v1/traces"}
    chat, refused = sorted(spans, key=lambda span: span.name, reverse=False)
    assert (chat.name, refused.name) == ("POST /v1/chat/completions", "POST /v1/completions")
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (TRACE, PARENT)
    assert refused.trace_id.hex() != TRACE and not refused.parent_span_id
    facts = values(chat)
    assert facts["gen_ai.usage.output_tokens"] == 40 and facts["gen_ai.usage.input_tokens"] > 2
    assert facts["forerun.request.id"] == "mine" and facts["gen_ai.operation.name"] == "chat"
    assert facts["forerun.draft_tokens"] >= facts["forerun.accepted_draft_tokens"] > 0
    assert facts["forerun.acceptance_length"] > 1
    assert facts["gen_ai.request.model"] == facts["gen_ai.response.model"] == "toy"
    assert facts["http.route"] == "/v1/chat/completions" and "error.type" not in facts
    assert facts["gen_ai.provider.name"] == "forerun"
    assert values(refused)["error.type"] == "invalid_value"
    (first,) = chat.events
    assert chat.start_time_unix_nano < first.time_unix_nano <= chat.end_time_unix_nano
    assert values(refused)["http.response.status_code"] == 400
    assert refused.status.code != StatusCode.ERROR.value, "the caller's fault, not the server's"


def test_a_collector_that_is_away_costs_no_answer(caplog):
    settings = ServeSettings(otlp_traces_endpoint="http://127.0.0.1:9")
    loaded = load(EngineConfig(model="toy"))
    with TestClient(create_app(loaded, settings), base_url="http://localhost") as client:
        assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
