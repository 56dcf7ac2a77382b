"""Names of models: with Ollama's tag, with a tag of their own, and in Anthropic's list."""

from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app, create_models_app
from forerun.serve.models import Source

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": False}
REQUESTS = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/api/chat": {**CHAT, "options": {"num_predict": 2}},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/completion": {"prompt": "Hi", "n_predict": 2},
}


@contextmanager
def strict(names, several):
    """A client of a toy that is called so, and takes no other name."""
    settings = ServeSettings(strict_model_names=True, served_name=() if several else names)
    toy = EngineConfig(model="toy")
    if several:
        source = Source(names[0], names[1:], 1000, lambda: load(toy))
        app = create_models_app([source], settings)
    else:
        app = create_app(load(toy), settings)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_every_dialect_takes_every_spelling_of_a_name(several):
    """A name that ends in the tag was not found by Ollama's clients, nor one with it by others."""
    with strict(("plain", "own:latest"), several) as client:
        for path, body in REQUESTS.items():
            for name in ("plain", "plain:latest", "own:latest"):
                answer = client.post(path, json={**body, "model": name})
                assert answer.status_code == 200, (path, name, answer.text)
            assert client.post(path, json={**body, "model": "other"}).status_code == 404
        for name in ("plain", "plain:latest", "own:latest"):
            assert client.post("/api/pull", json={"model": name}).status_code == 200


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    ("name", "listed"),
    [("toy", "toy:latest"), ("llama3:8b", "llama3:8b"), ("host:1/toy", "host:1/toy:latest")],
)
def test_ollamas_list_adds_its_tag_to_names_without_one(several, name, listed):
    with strict((name,), several) as client:
        (one,) = client.get("/api/tags").json()["models"]
        assert one["name"] == one["model"] == listed
        body = {**REQUESTS["/api/chat"], "model": listed}
        assert client.post("/api/chat", json=body).status_code == 200
        (one,) = client.get("/api/ps").json()["models"]
        assert one["model"] == listed


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_anthropics_list(several):
    """Several models were listed in OpenAI's words."""
    version = {"anthropic-version": "2023-06-01"}
    with strict(("toy",), several) as client:
        page = client.get("/v1/models", headers=version).json()
        (card,) = page["data"]
        assert (page["first_id"], page["has_more"], card["display_name"]) == ("toy", False, "toy")
        assert card["type"] == "model" and card["created_at"].endswith("Z")
        assert client.get("/v1/models/toy", headers=version).json() == card
        assert client.post("/v1/messages", json=REQUESTS["/v1/messages"]).status_code == 200
        loaded = client.get("/v1/models/toy", headers=version).json()
        assert loaded["max_input_tokens"] > 0


def test_what_needs_no_model_loads_none():
    """Ollama's clients look at the version first, and got a 503. A browser's question whether a
    page may ask, and a request without a body, which any page may send, loaded a model.
    """
    with strict(("toy",), several=True) as client:
        assert client.get("/api/version").json() == client.get("/version").json()
        assert client.get("/ping").status_code == client.post("/ping").status_code == 200
        for path in ("/v1/rerank", "/score", "/props", "/slots/0", "/api/create"):
            assert client.post(path, json={"model": "toy"}).status_code == 501, path
        assert client.request("DELETE", "/api/delete", json={"model": "toy"}).status_code == 501
        for method in ("OPTIONS", "PUT", "PATCH"):
            answer = client.request(method, "/v1/chat/completions", json={"model": "toy"})
            assert answer.status_code == 405 and answer.headers["allow"] == "POST"
            assert answer.json()["error"]["message"].endswith(f"takes POST, not {method}.")
        assert client.post("/v1/chat/completions").json()["error"]["code"] == "invalid_json"
        assert client.post("/flush_cache").json()["error"]["code"] == "not_loaded"
        (state,) = client.get("/v1/models").json()["data"]
        assert state["state"] == "unloaded"
        assert client.post("/v1/messages", json=REQUESTS["/v1/messages"]).status_code == 200
        assert client.post("/flush_cache").status_code == 200


def test_a_model_that_is_used_while_it_waits_to_be_let_go_stays():
    settings = ServeSettings(unload_after=5)
    source = Source("toy", (), 1000, lambda: load(EngineConfig(model="toy")))
    app = create_models_app([source], settings)
    models, now = app.state.service, 0.0
    models.clock = lambda: now
    with TestClient(app, base_url="http://localhost") as client:
        assert client.post("/v1/messages", json=REQUESTS["/v1/messages"]).status_code == 200
        client.portal.call(models._changing.acquire)
        now = 6.0
        waiting = client.portal.start_task_soon(models.let_go)
        assert client.post("/v1/messages", json=REQUESTS["/v1/messages"]).status_code == 200

        async def released():
            models._changing.release()

        client.portal.call(released)
        waiting.result()
        (state,) = client.get("/v1/models").json()["data"]
        assert state["state"] == "loaded"
