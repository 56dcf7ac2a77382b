"""Texts that are certainly too long are refused before they are encoded."""

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import toy_loaded


@pytest.fixture
def client(monkeypatch):
    with toy_loaded() as loaded, TestClient(create_app(loaded, ServeSettings())) as client:
        encode = loaded.tokenizer.plain

        def short_only(text, first):
            assert len(text) < 1000, "a long text was encoded"
            return encode(text, first)

        monkeypatch.setattr(loaded.tokenizer, "plain", short_only)
        yield client


LONG = "1" * 2_000_000
BODIES = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/api/generate": {"prompt": LONG, "raw": True},
    "/generate": {"text": LONG},
    "/v1/completions?blank": {"prompt": " \n" * 1_000_000},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_text_beyond_the_context_is_refused_unencoded(client, path):
    model = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post(path, json={"model": model, **BODIES[path]})
    assert answer.status_code == 400
    assert "at least" in answer.text
    assert "maximum context length" in answer.text
    assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
