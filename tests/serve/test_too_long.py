"""Texts that are certainly too long are refused before they are encoded."""

import json

import pytest
from starlette.testclient import TestClient

from forerun.options.config import ServeSettings
from forerun.serve.app import create_app
from tests.cli.toys import toy_loaded
from tests.worlds.toy_app import toy_client


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
BEGINNINGS = ("This model's maximum context length is ", "prompt is too long: ")
"""Words by which LiteLLM, and agents on it, know that a prompt is too long: they shorten it. The
last ones are Anthropic's own."""
BODIES = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/api/generate": {"prompt": LONG, "raw": True},
    "/api/chat": {"messages": [{"role": "user", "content": LONG}]},
    "/generate": {"text": LONG},
    "/v1/completions?blank": {"prompt": " \n" * 1_000_000},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_text_beyond_the_context_is_refused_unencoded(client, plain, path):
    model = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post(path, json={"model": model, **BODIES[path]})
    assert "at least" in answer.text and "maximum context length" in answer.text
    # Known only once it is encoded.
    encoded = json.loads(json.dumps(BODIES[path]).replace(LONG, LONG[:1100]))
    for one in (answer, plain.post(path, json={"model": model, **encoded})):
        assert one.status_code == 400 and BEGINNINGS[path == "/v1/messages"] in one.text
        assert "rate limit" not in one.text and "429" not in one.text
    other = plain.post(path, json={"model": 5})
    assert other.status_code == 400 and not any(words in other.text for words in BEGINNINGS)
    assert client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200


# --- more tokens than the context has ------------------------------------------------------------


HEADER = {"x-forerun-fit-max-tokens": "true"}
USER = [{"role": "user", "content": "Hi"}]
ROUTES = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 5000}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 5000}),
    ("/v1/completions", {"prompt": ["Hi", "Hello there"], "max_tokens": 1015}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 5000}),
    ("/v1/messages", {"messages": USER, "max_tokens": 5000}),
    ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 5000}}),
]


@pytest.fixture(scope="module")
def fitting():
    with (
        toy_loaded() as loaded,
        TestClient(create_app(loaded, ServeSettings(fit_max_tokens=True))) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain():
    with toy_client() as client:
        yield client


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_option_and_the_header_cut_max_tokens(fitting, plain, path, body):
    refused = plain.post(path, json=body)
    assert refused.status_code == 400 and "context_length_exceeded" in refused.text
    assert path != "/v1/messages" or "input length and `max_tokens` exceed context" in refused.text
    for answer in (fitting.post(path, json=body), plain.post(path, json=body, headers=HEADER)):
        assert answer.status_code == 200, answer.text
        assert "max_tokens (cut to " in answer.headers["x-forerun-ignored"]
    small = str(body).replace("5000", "3").replace("1015", "3")
    fine = fitting.post(path, json=eval(small))
    assert fine.status_code == 200 and "x-forerun-ignored" not in fine.headers


def test_a_prompt_that_is_too_long_is_refused_all_the_same(fitting):
    long = [{"role": "user", "content": "x" * 2000}]
    answer = fitting.post("/v1/chat/completions", json={"messages": long, "max_tokens": 9})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["code"] in error["message"] and "maximum context length is" in error["message"]
    assert "no room for an answer" in error["message"] and "max_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("path", "text", "usual"), [("/v1/completions", "prompt", 16), ("/generate", "text", 128)]
)
def test_a_limit_that_the_client_left_out_is_cut_to_the_context(plain, path, text, usual):
    for free in (1, usual - 1, usual, usual + 1):
        answer = plain.post(
            path,
            json={text: "x" * (1023 - free), "sampling_params": {}}
            if text == "text"
            else {text: "x" * (1023 - free)},
        )
        assert answer.status_code == 200, answer.text
    long = plain.post(path, json={text: "x" * 1024})
    assert long.status_code == 400 and "no room for an answer" in long.text
