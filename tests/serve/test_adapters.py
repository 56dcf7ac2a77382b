"""A server with LoRA adapters: each is a model by its name."""

import json
from dataclasses import replace
from functools import partial

import pytest
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.cli.command_line import build_parser, parsed
from forerun.cli.main import main
from forerun.cli.serve import prepared
from forerun.cli.several import Named, in_file, on_the_line, sources
from forerun.client.llm import LLM
from forerun.errors import ConfigError, RequestError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app, create_models_app
from tests.models import tiny
from tests.models.lora import save_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    hf = tiny.model("llama", max_position_embeddings=512)
    base = tiny.save_folder(hf, folder / "base")
    return base, [save_adapter(hf, folder / name, seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def client(folders):
    base, adapters = folders
    named = tuple(f"{path.name}={path}" for path in adapters)
    config = EngineConfig(model=str(base), device="cpu", lora_modules=named, kv_tokens=512)
    loaded = load(config)
    settings = ServeSettings(served_name=("base",), strict_model_names=True)
    with TestClient(create_app(loaded, settings)) as client:
        while client.get("/health").status_code != 200:
            pass
        yield client


def text(client, model, **more):
    body = {"model": model, "prompt": "Hello", "max_tokens": 12, "temperature": 0, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_each_adapter_is_a_model(client):
    texts = {model: text(client, model) for model in ("base", "a", "b")}
    assert len(set(texts.values())) == 3
    off = {"speculative": {"enabled": False}}
    assert texts == {model: text(client, model, **off) for model in texts}
    answer = client.post("/v1/completions", json={"model": "c", "prompt": "a"})
    assert answer.status_code == 404 and "'a', 'b'" in answer.text
    vectors = [
        client.post("/v1/embeddings", json={"model": m, "input": "Hi"}).json()["data"]
        for m in texts
    ]
    assert vectors[0] != vectors[1] != vectors[2]


@pytest.mark.parametrize(
    ("route", "body", "key"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 12}, "lora_path"),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 12}, "lora"),
        ("/completion", {"prompt": "Hello", "n_predict": 12}, "lora"),
        ("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 12}}, "lora_path"),
    ],
)
def test_a_request_names_an_adapter_beside_its_model(client, route, body, key):
    """As SGLang's and llama.cpp's clients do."""
    none, b = ("", "b") if key == "lora_path" else ([], [{"id": 1, "scale": 1}, {"id": 0}])
    body.get("sampling_params", body)["temperature"] = 0
    for value, model in ((none, "base"), (b, "b")):
        answer = client.post(route, json={**body, key: value}).json()
        written = answer["choices"][0]["text"] if "choices" in answer else None
        assert (written or answer.get("content") or answer["text"]) == text(client, model)
    for value in ("c", ["b", 1]) if key == "lora_path" else ([{"id": 2, "scale": 1}], "b"):
        answer = client.post(route, json={**body, key: value})
        assert answer.status_code == 400 and key in answer.text
    if key == "lora":
        for value in ([{"id": 0, "scale": 0.5}], [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]):
            answer = client.post(route, json={**body, key: value})
            assert answer.status_code == 400 and "one adapter at most" in answer.text


def test_texts_of_one_request_share_an_adapter(client):
    body = {"text": ["Hello", "Hello"], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    one, two = client.post("/generate", json={**body, "lora_path": ["a", "a"]}).json()
    assert one["text"] == two["text"]
    assert client.post("/generate", json={**body, "lora_path": ["a", "b"]}).status_code == 400


def test_a_program_and_a_command_answer_with_an_adapter(client, folders, capsys):
    base, (a, b) = folders
    common = {"device": "cpu", "kv_tokens": 512}
    with LLM(str(base), lora_modules=(f"a={a}", f"b={b}"), **common) as llm:
        for name in (None, "a", "b"):
            (answer,) = llm.generate("Hello", max_tokens=12, lora_name=name)
            assert answer.text == text(client, name or "base")
        for wrong in ({"lora_name": "c"}, {"adapter": 0}):
            with pytest.raises(RequestError, match=r"no adapter 'c'|no sampling option 'adapter'"):
                llm.generate("Hello", **wrong)
    line = ["run", str(base), "Hello", "--raw", "--max-tokens", "12", "--temperature", "0"]
    line += ["--device", "cpu", "--kv-tokens", "512", "--json", "--lora-modules", f"b={b}"]
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text(client, "b")
    assert main([*line, f"a={a}"]) == 2
    assert "one adapter answers here" in capsys.readouterr().err


def test_they_are_listed(client, folders):
    cards = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert cards.keys() == {"base", "a", "b"}
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("base", str(folders[1][0]))
    assert client.get("/v1/models/b").json() == cards["b"]
    tags = [one["model"] for one in client.get("/api/tags").json()["models"]]
    assert tags == ["base:latest", "a:latest", "b:latest"]
    listed = client.get("/lora-adapters").json()
    assert [(one["id"], one["name"], one["scale"]) for one in listed] == [(0, "a", 1), (1, "b", 1)]


def test_acceptance_is_counted_by_adapter(client):
    text(client, "b")
    page = client.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("forerun:adapter_steps")]
    assert any('adapter="b"' in line and not line.endswith(" 0.0") for line in lines), lines


@pytest.mark.parametrize(
    ("more", "word"),
    [({"executor": "jax"}, "the executor jax runs no adapters"), ({"model": "toy"}, "the toy")],
)
def test_where_none_can_run_it_is_said(folders, more, word):
    base, (adapter, _) = folders
    with pytest.raises(ConfigError, match=word):
        load(EngineConfig(**{"model": str(base), "lora_modules": (f"a={adapter}",), **more}))


def test_a_server_of_several_models_finds_an_adapters_model(folders, client, tmp_path):
    base, adapters = folders
    named = [f"{path.name}={path}" for path in adapters]
    config = EngineConfig(device="cpu", kv_tokens=512)
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"toy": {}, "base": {"model": str(base), "lora-modules": named}}))
    models = in_file(file, build_parser().parse_args(["serve"]).options, config)
    app = create_models_app(sources(models, lambda one: partial(load, one)), ServeSettings())
    with TestClient(app, base_url="http://localhost") as several:
        for _ in range(2):  # Before it is loaded, and after.
            cards = {one["id"]: one for one in several.get("/v1/models").json()["data"]}
            tags = [one["model"] for one in several.get("/api/tags").json()["models"]]
            assert tags == [f"{name}:latest" for name in cards]
            assert cards.keys() == {"toy", "base", "a", "b"}
            assert (cards["b"]["parent"], cards["b"]["root"]) == ("base", str(adapters[1]))
            assert several.get("/v1/models/b").json() == cards["b"]
            for name in ("b", "base"):
                assert text(several, name) == text(client, name)
    with pytest.raises(ConfigError, match="calls an adapter 'gpt', as the model"):
        prepared(parsed(["serve", "x", "--served-name", "gpt", "--lora-modules", "gpt=x"]))
    with pytest.raises(ConfigError, match="--lora-modules applies to one model"):
        on_the_line(["toy", str(base)], replace(config, lora_modules=(named[0],)))
    with pytest.raises(ConfigError, match="two models or adapters are called 'a'"):
        sources([*models, Named("a", EngineConfig(model="toy"))], lambda one: partial(load, one))
