"""Several models in one server: loaded on demand, let go by memory and time, apart in failure."""

import asyncio
import os
import signal
import sys
import threading
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.cli import serve
from forerun.cli.command_line import build_parser, parsed
from forerun.cli.several import in_file, in_folder, on_the_line, size_of, sources
from forerun.client.engine_process import EngineCommand
from forerun.client.engine_start import EngineProgram
from forerun.errors import ConfigError, ModelError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve import models
from forerun.serve.answers import answering
from forerun.serve.app import create_app, create_models_app
from forerun.serve.bodies.wire import parse_json
from forerun.serve.http.workers import Workers
from forerun.serve.models import Source
from forerun.text.json_text import MOST_CONTAINERS
from tests.covering import spread
from tests.worlds.servers import alive, wait_for

JSON = {"content-type": "application/json"}


class ToyModels:
    """Toys under several names, and what was loaded of them."""

    def __init__(self, names=("a", "b", "c"), **settings):
        self.loads, self.open = [], {}
        self.broken, self.now, self.gate = set(), 0.0, None
        made = [
            Source(name, (f"org/{name}",), 1000, lambda name=name: self.load(name))
            for name in names
        ]
        self.app = create_models_app(made, ServeSettings(**settings))
        self.models = self.app.state.service
        self.models.memory = lambda: 10**12
        self.models.clock = lambda: self.now

    def load(self, name):
        if self.gate is not None:
            self.gate.wait(60)
        self.loads.append(name)
        if name in self.broken:
            raise ModelError(f"{name} is damaged")
        loaded = load(EngineConfig(model="toy"))
        self.open[name] = loaded
        return loaded

    def states(self, client):
        return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}


def client_of(shelf):
    return TestClient(shelf.app, base_url="http://localhost")


@pytest.fixture
def shelf():
    return ToyModels()


@pytest.fixture
def client(shelf):
    with client_of(shelf) as client:
        yield client


def ask(client, model, **more):
    body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0, **more}
    return client.post("/v1/completions", json=body if model is None else {"model": model, **body})


def test_models_are_loaded_when_they_are_named_and_answers_name_them(shelf, client):
    assert client.get("/health").status_code == 200
    assert shelf.states(client) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    assert client.get("/server_info").json()["error"]["code"] == "not_loaded"
    assert client.get("/nothing").status_code == 404 and shelf.loads == []
    answer = ask(client, "b").json()
    assert answer["model"] == "b" and answer["usage"]["completion_tokens"] == 4
    assert shelf.states(client) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert ask(client, "org/b").json()["model"] == "b" and shelf.loads == ["b"]
    assert ask(client, None).json()["model"] == "b", "the one that was used last"
    refused = ask(client, "d")
    assert refused.status_code == 404 and "'a', 'b', 'c'" in refused.json()["error"]["message"]
    assert ask(client, "a").json()["choices"][0]["text"] == answer["choices"][0]["text"]
    assert client.get("/server_info").json()["model"] == "toy"


def test_a_look_may_name_the_model(shelf, client):
    for name in ("a", "b", "b"):
        ask(client, name)
    for name in ("a", "b"):
        facts = client.get("/server_info", params={"model": name}).json()
        assert facts["stats"]["output_tokens"] == {"a": 4, "b": 8}[name]
    answer = client.get("/server_info", params={"model": "c"})
    assert answer.json()["error"]["code"] == "not_loaded" and shelf.loads == ["a", "b"]
    assert client.get("/server_info", params={"model": "d"}).status_code == 404


def test_every_dialect_reaches_every_model(shelf, client):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert client.post("/v1/chat/completions", json={"model": "a", **chat}).json()["model"] == "a"
    assert client.post("/v1/messages", json={"model": "b", **chat}).json()["model"] == "b"
    body = {"model": "c:latest", "messages": chat["messages"], "stream": False}
    answer = client.post("/api/chat", json={**body, "options": {"num_predict": 4}})
    assert answer.json()["message"]["role"] == "assistant"
    streamed = {"model": "a", "prompt": "x", "stream": True, "max_tokens": 3}
    with client.stream("POST", "/v1/completions", json=streamed) as stream:
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    assert shelf.loads == ["a", "b", "c"]
    tags = [one["name"] for one in client.get("/api/tags").json()["models"]]
    assert tags == ["a:latest", "b:latest", "c:latest"]
    assert len(client.get("/api/ps").json()["models"]) == 3


def test_metrics_have_a_sample_per_model(shelf, client):
    ask(client, "a"), ask(client, "b"), ask(client, "b")
    page = client.get("/metrics").text
    samples = {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    }
    assert samples == {"a": 4, "b": 8}


def test_idle_models_are_let_go_after_their_time():
    shelf = ToyModels(unload_after=100)
    with client_of(shelf) as client:
        ask(client, "a")
        shelf.now = 60
        ask(client, "b")
        shelf.now = 99
        client.portal.call(shelf.models.let_go)
        assert shelf.states(client) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        shelf.now = 101
        client.portal.call(shelf.models.let_go)
        assert shelf.states(client) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert not shelf.open["a"].engine.alive and shelf.open["b"].engine.alive
        assert ask(client, "a").status_code == 200 and shelf.loads == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        *((0, 1.5), ("10s", 11), ("1h30m", 5401), ("-1m", None)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1m", 61), (-1, None))),
    ],
)
def test_ollamas_keep_alive_is_honoured(shelf, client, keep, gone):
    body = {"model": "a", "prompt": "Hi", "stream": False, "keep_alive": keep}
    assert client.post("/api/generate", json=body).status_code == 200
    if gone is not None and gone > 2:
        shelf.now = gone - 2
        client.portal.call(shelf.models.let_go)
        assert shelf.states(client)["a"] == "loaded"
    shelf.now = gone or 10**9
    client.portal.call(shelf.models.let_go)
    assert shelf.states(client)["a"] == ("unloaded" if gone else "loaded")


def test_the_model_used_longest_ago_makes_room():
    shelf = ToyModels(max_loaded_models=2)
    with client_of(shelf) as client:
        for shelf.now, name in enumerate(("a", "b", "a", "c")):
            assert ask(client, name).status_code == 200
        assert shelf.states(client) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_memory_is_looked_at_before_loading(shelf, client):
    ask(client, "a")
    # A model takes 1250 bytes.
    shelf.models.memory = lambda: 1249 if shelf.open["a"].engine.alive else 1250
    assert ask(client, "b").status_code == 200
    assert shelf.states(client) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}


def test_a_model_that_answers_is_not_let_go_for_another():
    shelf = ToyModels(max_loaded_models=1, unload_after=10)
    with client_of(shelf) as client:
        ask(client, "a")
        shelf.models.entries["a"].active += 1
        shelf.now = 1000
        client.portal.call(shelf.models.let_go)
        refused = ask(client, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
        assert "since 1 models may be loaded" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] and ask(client, "a").status_code == 200
        shelf.models.entries["a"].active -= 1
        assert ask(client, "b").status_code == 200


def test_one_models_failure_is_its_own(shelf, client):
    shelf.broken.add("b")
    ask(client, "a")
    refused = ask(client, "b")
    assert refused.status_code == 503 and "b is damaged" in refused.json()["error"]["message"]
    assert shelf.states(client) == {"a": "loaded", "b": "failed", "c": "unloaded"}
    assert client.get("/health").json()["faults"] == {"b": "b is damaged"}
    assert ask(client, "a").status_code == 200
    shelf.broken.clear()
    assert ask(client, "b").status_code == 200, "it is tried again"
    shelf.open["b"].engine.shutdown()
    assert ask(client, "a").status_code == 200
    assert ask(client, "b").status_code == 200, "a stopped engine is loaded anew"
    assert shelf.loads == ["a", "b", "b", "b"]


def test_requests_without_a_model_get_none_that_failed(shelf, client):
    shelf.broken.add("b")
    shelf.now = 5.0
    assert ask(client, "b").status_code == 503
    assert ask(client, None).json()["model"] == "a"
    for name in (["a"], 7, {"id": "a"}):
        refused = ask(client, name)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("model must be a string, not ")


def test_requests_that_come_while_a_model_loads_wait_for_it(shelf, client):
    shelf.gate = threading.Event()
    answers = []
    asking = [begun(client, "a", answers) for _ in range(3)]
    shelf.gate.set()
    for one in asking:
        one.join()
    assert answers == [200] * 3 and shelf.loads == ["a"]


def begun(client, model, answers):
    """A thread that asks; it is waited for until the model is being loaded."""
    thread = threading.Thread(target=lambda: answers.append(ask(client, model).status_code))
    thread.start()
    shelf = client.app.state.service
    assert wait_for(lambda: shelf.entries[model].state == "loading")
    return thread


def test_models_that_load_stop_no_other(shelf, client):
    """Neither one that is loaded nor one that is loaded meanwhile, however long they take."""
    ask(client, "a")
    shelf.gate, answers = threading.Event(), []
    waiting = [begun(client, "b", answers), begun(client, "c", answers)]
    assert ask(client, "a").status_code == 200
    shelf.now = 10**9
    client.portal.call(shelf.models.let_go)
    shelf.gate.set()
    for one in waiting:
        one.join()
    assert answers == [200, 200] and sorted(shelf.loads) == ["a", "b", "c"]


def test_one_waits_for_room_that_another_may_leave():
    shelf = ToyModels(max_loaded_models=1)
    shelf.gate, answers = threading.Event(), []
    with client_of(shelf) as client:
        one = begun(client, "a", answers)
        other = threading.Thread(target=lambda: answers.append(ask(client, "b").status_code))
        other.start()
        assert wait_for(lambda: shelf.models.entries["b"].loading is not None)
        assert shelf.states(client)["b"] == "unloaded" and not answers
        shelf.gate.set()
        one.join(), other.join()
        assert 200 in answers and set(answers) <= {200, 503}  # It may still answer.


def test_the_end_while_a_model_loads(shelf, client):
    shelf.gate, answers = threading.Event(), []
    one = begun(client, "a", answers)
    client.portal.call(shelf.models.close)
    one.join()
    assert answers == [503]
    shelf.gate.set()


@pytest.mark.parametrize("keep", spread([10**400, -(10**400), 1e300, "9" * 33, True], 2))
def test_what_is_refused_as_keep_alive_keeps_nothing(keep):
    shelf = ToyModels(unload_after=5)
    with client_of(shelf) as client:
        body = {"model": "a", "prompt": "Hi", "stream": False}
        assert client.post("/api/generate", json=body).status_code == 200
        refused = client.post("/api/generate", json={**body, "keep_alive": keep})
        assert refused.status_code == 400 and shelf.models.entries["a"].keep == 5
        shelf.now = 6
        client.portal.call(shelf.models.let_go)
        assert shelf.states(client)["a"] == "unloaded"


def test_a_task_that_dies_is_heard(monkeypatch, caplog):
    async def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr(models, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(models.Models, "let_go", fails)
    with client_of(ToyModels()):
        assert wait_for(lambda: "unloading by time has failed" in caplog.text)


def test_a_body_is_parsed_once(monkeypatch):
    parsed = []
    for module in (models, answering):
        monkeypatch.setattr(module, "parse_json", lambda data: parsed.append(0) or parse_json(data))
    with client_of(ToyModels()) as client:
        assert ask(client, "a").status_code == 200 and parsed == [0]


def test_what_is_no_request_loads_nothing(shelf, client):
    many = "[" + "[]," * MOST_CONTAINERS + "1]"
    for data in ("{", '{"model": "a", "model": "b"}', f'{{"model": "a", "stop": {many}}}'):
        refused = client.post("/v1/completions", content=data, headers=JSON)
        assert refused.json()["error"]["code"] == "invalid_json"
    refused = ask(client, "x" * 1_000_000)
    assert refused.status_code == 404 and len(refused.content) < 1000
    assert shelf.loads == []


def test_bodies_that_wait_for_a_model_count_as_bodies():
    shelf = ToyModels(max_body_bytes=1024)
    shelf.gate, answers = threading.Event(), []
    with client_of(shelf) as client:
        asking = [
            threading.Thread(target=lambda: answers.append(ask(client, "a", user="x" * 800)))
            for _ in range(20)
        ]
        for one in asking:
            one.start()
        assert wait_for(lambda: answers)
        shelf.gate.set()
        for one in asking:
            one.join()
        assert {one.status_code for one in answers} == {200, 429}


def test_the_end_closes_all():
    shelf = ToyModels()
    with client_of(shelf) as client:
        ask(client, "a"), ask(client, "b")
        assert client.portal.call(shelf.models.drain, 5)
        assert ask(client, "a").json()["error"]["code"] == "shutting_down"
    assert not any(loaded.engine.alive for loaded in shelf.open.values())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("stage", ["JSON", "parameters"])
def test_nothing_that_is_being_read_is_cut_off_at_the_end(several, path, stage, monkeypatch):
    """A request whose body is there belongs to those that a drain waits for."""
    begun, gate = threading.Event(), threading.Event()

    async def held(self, size, work, *args, **kwargs):
        if (work is parse_json) == (stage == "JSON"):
            begun.set()
            await asyncio.to_thread(gate.wait, 60)
        return work(*args, **kwargs)

    source = partial(load, EngineConfig(model="toy"))
    app = ToyModels().app if several else create_app(source, ServeSettings())
    body = {"model": "a", "prompt": "Hi"}
    with TestClient(app, base_url="http://localhost") as client:
        assert wait_for(lambda: client.post(path, json=body).status_code == 200)
        monkeypatch.setattr(Workers, "run", held)
        answers, drained = [], []
        asking = threading.Thread(target=lambda: answers.append(client.post(path, json=body)))
        ending = threading.Thread(
            target=lambda: drained.append(client.portal.call(app.state.service.drain, 60))
        )
        asking.start()
        assert begun.wait(60)
        ending.start()
        assert wait_for(lambda: client.get("/health").status_code == 503)
        # What several models' door reads is not yet a request to one of them.
        assert not drained or (several and stage == "JSON")
        gate.set()
        asking.join()
        ending.join()
        reply = answers[0].json()
        assert answers[0].status_code == 200 or reply["error"]["code"] == "shutting_down", reply
        assert drained == [True]


def test_an_engine_that_is_killed_is_started_again_and_touches_no_other():
    command = (sys.executable, "-m", "tests.worlds.toy_engine")
    made = [
        Source(name, (), 1000, EngineCommand(EngineProgram(command, {}), EngineConfig(model="toy")))
        for name in ("a", "b")
    ]
    with TestClient(
        create_models_app(made, ServeSettings()), base_url="http://localhost"
    ) as client:
        text = ask(client, "a").json()["choices"][0]["text"]
        assert ask(client, "b").status_code == 200
        pids = client.get("/health").json()["engine_pids"]
        assert len({os.getpid(), *pids.values()}) == 3
        os.kill(pids["a"], signal.SIGKILL)
        # Until the server has heard of it, a request that comes gets an error.
        answers = []
        assert wait_for(lambda: answers.append(ask(client, "a")) or answers[-1].status_code == 200)
        assert {answer.json()["error"]["code"] for answer in answers[:-1]} <= {"engine_stopped"}
        assert answers[-1].json()["choices"][0]["text"] == text
        after = client.get("/health").json()["engine_pids"]
        assert after["a"] != pids["a"] and after["b"] == pids["b"]
        client.portal.call(client.app.state.service.close)
        assert not any(map(alive, after.values()))


def loading(config):
    return partial(load, config)


def named(references, config):
    return sources(on_the_line(references, config), loading)


def test_a_folder_of_models_and_their_names(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"1234")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "config.json").write_text("{}")
    (tmp_path / "y" / "model.safetensors").write_bytes(b"123")
    (tmp_path / "notes.txt").touch()
    models = named([*in_folder(tmp_path), "smollm2-135m"], EngineConfig())
    assert [(one.name, one.size) for one in models][:2] == [("x", 4), ("y", 3)]
    assert models[2].name == "smollm2-135m" and size_of("smollm2-135m") > 90_000_000
    with pytest.raises(ModelError, match="no model 'nonsense'"):
        named(["toy", "nonsense"], EngineConfig())
    draft = EngineConfig(speculative_draft_model_path="d")
    with pytest.raises(ConfigError, match="--speculative-draft-model-path applies to one model"):
        named(["toy", "smollm2-135m"], draft)
    with pytest.raises(ConfigError, match="holds no"):
        in_folder(tmp_path / "y")


def test_what_lies_beside_models_is_none_and_keeps_none_from_being_served(tmp_path):
    """Links to nothing, what macOS hides, projectors, and parts behind the first."""
    for name, size in (("x.gguf", 4), ("z-00001-of-00002.gguf", 5), ("z-00002-of-00002.gguf", 6)):
        (tmp_path / name).write_bytes(bytes(size))
    others = ("._x.gguf", "mmproj-F16.gguf", "x.mmproj-q8_0.gguf", "mtp-x.gguf", "x.gguf.part")
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "config.json").write_text("{}")
    for link in ("gone.gguf", "gone", "y/model.safetensors"):
        (tmp_path / link).symlink_to(tmp_path / "nothing")
    models = named(in_folder(tmp_path), EngineConfig())
    assert [(one.name, one.size) for one in models] == [
        ("x", 4), ("y", 0), ("z-00001-of-00002", 11),
    ]  # fmt: skip
    (tmp_path / "y.gguf").write_bytes(b"12")
    models = named(in_folder(tmp_path), EngineConfig())
    assert [(one.name, one.size) for one in models][1:3] == [("y", 0), ("y.gguf", 2)]


OPTIONS = build_parser().parse_args(["serve"]).options


def described(tmp_path, text, config=None):
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return in_file(file, OPTIONS, config or EngineConfig(max_sequences=3, context=64))


def test_models_of_a_file_have_options_of_their_own(tmp_path):
    models = described(
        tmp_path,
        """
        small: {model: toy, ctx-size: 128, served-model-name: [gpt-4, tiny]}
        smollm2-135m:
        plain:
          model: toy
          speculative_algorithm: "OFF"
          max-sequences: 1
        """,
    )
    small, default, plain = (one.config for one in models)
    assert (small.model, small.context, small.max_sequences) == ("toy", 128, 3)
    assert (default.model, default.context) == ("smollm2-135m", 64)
    assert (plain.speculative_algorithm, plain.max_sequences, plain.context) == ("OFF", 1, 64)
    assert [one.name for one in models] == ["small", "smollm2-135m", "plain"]
    opened = sources(models, loading)
    assert opened[0].others == ("gpt-4", "tiny", "toy")
    app = create_models_app(opened, ServeSettings())
    with TestClient(app, base_url="http://localhost") as client:
        for name, answers, context in (("gpt-4", "small", 128), ("plain", "plain", 64)):
            assert ask(client, name).json()["model"] == answers
            facts = client.get("/server_info", params={"model": name}).json()
            assert facts["config"]["context"] == context


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {model: toy, port: 80}", "port in .*models.yaml, a is a server option"),
        ("a: {model: toy, contxt: 80}", "models.yaml, a: There is no option --contxt"),
        ("a: {model: toy, context: many}", "context in .*models.yaml, a takes a whole number"),
        ("a: {model: toy, context: -8}", "models.yaml, a: context"),
        ("a: {model: toy, lora: x}", "use --lora-modules"),
        ("a: 7", "models.yaml, a: options of a model are lines"),
        ("- toy", "must hold lines"),
        ("", "names no model"),
    ],
)
def test_what_a_file_of_models_says_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        described(tmp_path, text)


def test_no_two_models_have_one_name(tmp_path):
    models = described(tmp_path, "a: {model: toy, served-name: b}\nb: {model: smollm2-135m}")
    with pytest.raises(ConfigError, match="two models or adapters are called 'b'"):
        sources(models, loading)


def test_one_name_for_several_models_is_refused(tmp_path):
    line = ["serve", "toy", "smollm2-135m", "--served-name", "x"]
    with pytest.raises(ConfigError, match="--served-name names a single model"):
        serve.main(parsed(line))
