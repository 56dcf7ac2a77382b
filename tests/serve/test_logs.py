"""The server's log: text for people, JSON for machines, no line for what only looks."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.cli import serve
from forerun.cli.command_line import parsed
from forerun.cli.start_log import StartLog, as_log
from forerun.engine.metrics import EngineMetrics
from forerun.engine.stats import Load, SourceCount, snapshot
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from forerun.serve.http.hosts import AllowedHosts
from forerun.serve.middleware import RequestMiddleware
from forerun.serve.observe import draft_alarm
from forerun.serve.observe.decode_log import DecodeLog
from forerun.serve.observe.logs import configure_logs
from forerun.serve.server import uvicorn_config
from forerun.speculative.tree import DraftSource
from tests.cli.toys import toy_loaded

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def logged(capsys):
    """Configure the log; afterwards it is as before. Gives the lines so far."""
    names = ("", "uvicorn.error", "httpx", "httpcore", "asyncio")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.getLogger().handlers[:]

    def begin(level, kind):
        configure_logs(level, kind)

        def lines():
            return capsys.readouterr().err.splitlines()

        return lines

    yield begin
    logging.getLogger().handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


def send_requests(headers=None):
    loaded = load(EngineConfig(model="toy"))
    with TestClient(create_app(loaded, ServeSettings()), base_url="http://localhost") as client:
        body = {"prompt": "Hi", "max_tokens": 5, "temperature": 0}
        for path in ("/health", "/metrics", "/v1/models", "/", "/server_info"):
            assert client.get(path).status_code == 200
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert client.get("/v1/nothing").status_code == 404
        assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400


def test_lines_are_for_requests_and_refusals_not_for_polls(logged):
    lines = logged("info", "text")
    send_requests()
    logged_lines = [line.partition(" forerun.serve: ")[2] for line in lines()]
    assert [line.split(" id=")[0] for line in logged_lines if " id=" in line] == [
        "POST /v1/completions 200", "GET /v1/nothing 404", "POST /v1/completions 400",
    ]  # fmt: skip
    assert "in=2 cached=0 out=5" in " ".join(logged_lines)
    assert next(line for line in logged_lines if "completions 400" in line).endswith(
        "(invalid_value prompt)"
    )


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "(invalid_value messages[0])"),
        ({"a b\nforged 200 line": 1, "messages": []}, "(invalid_value)"),
        ({"messages": [{"role": "user", "content": "Hi", "secret": 1}]}, "(invalid_value)"),
    ],
)
def test_the_field_of_a_refusal_is_named_as_far_as_it_is_ours(logged, body, ending):
    lines = logged("info", "text")
    loaded = load(EngineConfig(model="toy"))
    with TestClient(create_app(loaded, ServeSettings()), base_url="http://localhost") as client:
        client.post("/v1/chat/completions", json=body)
    (line,) = [line for line in lines() if "completions 400" in line]
    assert line.endswith(ending)


@pytest.mark.parametrize(
    ("level", "kind", "shown"),
    [("info", "text", True), ("warning", "text", False), ("error", "text", False)],
)
def test_a_good_start_is_silent_where_only_warnings_are_wanted(capsys, logged, level, kind, shown):
    lines = logged(level, kind)
    start = StartLog(as_log(ServeSettings(log_level=level, log_format=kind)), False, True)
    start.listening("http://here/v1")
    start.loaded({"model": "toy"}, 1.0)
    printed = capsys.readouterr()
    assert not lines() and not printed.out and bool(printed.err) == shown


def test_what_is_said_of_flags_is_in_the_log_once(logged, capsys):
    """Also where a line that is no JSON would stop a reader of the log."""
    lines = logged("info", "json")
    words = ["--log-format", "json", "--attention-backend", "fa", "--trust-remote-code"]
    arguments = parsed(["serve", "toy", *words])
    assert not lines()
    serve.prepared(arguments)
    flags = [json.loads(line)["message"].split()[0] for line in lines()]
    assert flags == ["--attention-backend", "--trust-remote-code"]
    serve.prepared(arguments)
    assert not lines()
    parsed(["run", "--attention-backend", "fa", "Hi"])
    assert len(lines()) == 1


def test_polls_of_a_server_that_loads_fill_no_log(logged):
    """Such lines filled the pipe of a parent that did not read them, and the server then stood."""
    lines = logged("info", "text")
    app = RequestMiddleware(Response(status_code=503), (), AllowedHosts("localhost", ()))
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/v1/models").status_code == 503
    assert client.post("/v1/completions", json={}).status_code == 503
    logged_lines = [line for line in lines() if " forerun.serve: " in line]
    assert len(logged_lines) == 1 and "POST /v1/completions 503" in logged_lines[0], logged_lines


def test_json_has_the_same_as_fields(logged):
    lines = logged("info", "json")
    send_requests({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"})
    records = [json.loads(line) for line in lines()]
    (request,) = [line for line in records if line.get("id") == "mine"]
    assert (request["method"], request["path"], request["status"]) == (
        "POST",
        "/v1/completions",
        200,
    )
    assert (request["in"], request["cached"], request["out"]) == (2, 0, 5)
    assert request["trace"] == TRACE
    assert request["ms"] >= request["ttft_ms"] >= 0 and request["level"] == "info"
    assert [line["status"] for line in records if line.get("path") == "/v1/nothing"] == [404]


def test_libraries_speak_under_our_names_and_say_nothing_of_their_own_start(logged):
    lines = logged("info", "text")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application")
    (line,) = lines()
    assert line.endswith("forerun.http error: Exception in ASGI application")
    lines = logged("info", "json")
    try:
        raise ValueError("no\nbody")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed")
    (line,) = lines()
    record = json.loads(line)
    assert (record["logger"], record["level"]) == ("forerun.http", "error")
    assert "ValueError: no\nbody" in record["exception"]


# --- decode log ----------------------------------------------------------------------------------


LOAD = Load(waiting=2, running=3, pages=100, pages_held=25, pages_evictable=0)


def test_a_line_every_so_many_steps():
    counts, seconds = EngineMetrics(), iter(range(0, 100, 2))
    state = [snapshot(counts, LOAD)]
    decode_log = DecodeLog(4, state[0], clock=lambda: float(next(seconds)))
    state[0] = replace(state[0], steps=3)
    assert decode_log.look(state[0]) == []
    state[0] = replace(
        state[0],
        steps=4,
        output_tokens=10,
        draft_tokens=8,
        accepted=6,
        acceptance_length=2.5,
        prompt_tokens=30,
        cached_tokens=16,
    )
    assert decode_log.look(state[0]) == [
        "Prefill batch. #new-token: 14, #cached-token: 16, token usage: 0.25, "
        "#running-req: 3, #queue-req: 2",
        "Decode batch. #token: 10, #step: 4, token usage: 0.25, accept len: 2.50, "
        "accept rate: 0.75, gen throughput (token/s): 5.00, #running-req: 3, #queue-req: 2",
    ]
    assert decode_log.look(state[0]) == []
    state[0] = replace(state[0], steps=9, output_tokens=15)
    (line,) = decode_log.look(state[0])
    assert "#token: 5, #step: 5" in line and "none drafted" in line


def test_a_certificate_that_cannot_be_used(tmp_path):
    settings = ServeSettings(ssl_keyfile=str(tmp_path / "k"), ssl_certfile=str(tmp_path / "c"))
    with toy_loaded() as loaded, pytest.raises(ConfigError, match=r"ssl-certfile .* No such file"):
        uvicorn_config(create_app(loaded, settings), settings)


# --- a draft model that is hardly ever right is named once, of whatever kind it is ---------------


NONE = snapshot(EngineMetrics(), Load(0, 0, 10, 0, 0))


def stats(verified, right, drafts, source=DraftSource.DRAFT_MODEL):
    counts = SourceCount(source.name.lower(), 1, verified, right), SourceCount("ngram", 1, 900, 0)
    return replace(NONE, drafts=drafts, by_source=(*counts, SourceCount(counts[0].source, 2, 9, 9)))


@pytest.mark.parametrize(
    ("counted", "warns"),
    [
        (stats(200, 19, 300), True),
        (stats(200, 20, 300), False),
        (stats(199, 0, 300), False),
        (stats(1600, 30, 200), False),  # Eight siblings each: 15 % of the drafts.
        (stats(200, 0, 300, DraftSource.NGRAM), False),
        (NONE, False),
    ],
)
def test_it_warns_of_few_first_tokens_that_are_right(counted, warns):
    assert (draft_alarm.seldom_right(counted) is not None) == warns


def test_it_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(draft_alarm, "LOOK_SECONDS", 0.0)
    answers = iter([NONE, stats(500, 3, 500)])

    async def counted():
        return next(answers)

    with caplog.at_level(logging.WARNING):
        asyncio.run(draft_alarm.watch(counted))
    assert caplog.text.count("3 of 500 first draft tokens were accepted") == 1
