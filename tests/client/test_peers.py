"""The bench beside peers' servers: what it asks of all alike, and how it counts."""

import asyncio
from pathlib import Path

import pytest

from bench.peers import over_http, servers
from bench.peers.environments import ENVIRONMENTS

PEERS = Path(over_http.__file__).parent


def failing(monkeypatch, *errors):
    """`asked` raises these, one after the other, and then answers."""
    left = list(errors)

    def asked(*_):
        if left:
            raise RuntimeError(left.pop(0))
        return {"whole": 1.0}

    monkeypatch.setattr(over_http, "asked", asked)


def test_a_dropped_connection_is_never_passed_over(monkeypatch, capsys):
    failing(monkeypatch, "ReadError: gone", "RemoteProtocolError: cut")
    answer = over_http.patiently("peer", "http://x", None, 64, {})
    assert answer == {"whole": 1.0, "dropped": 2}
    said = capsys.readouterr().err
    assert said.count("dropped a connection") == 2 and "cut" in said


@pytest.mark.parametrize("errors", [["ReadError: gone"] * 3, ["HTTP 500: no"]])
def test_what_goes_on_or_is_no_connection_ends_the_visit(monkeypatch, errors):
    failing(monkeypatch, *errors)
    with pytest.raises(RuntimeError, match=errors[0][:5]):
        over_http.patiently("peer", "http://x", None, 64, {})


def test_a_request_that_is_never_answered_is_a_dropped_one(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(over_http, "load_level", never)
    monkeypatch.setattr(over_http, "PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="not all answers came") as raised:
        over_http.passed(None, [{}], 1)
    assert str(raised.value).startswith(over_http.DROPPED)


def test_what_the_steps_are_measured_with_can_be_made():
    for name in ("llamacpp", "onnx"):
        assert name in ENVIRONMENTS and (PEERS / f"steps_{name}.py").exists()
    kinds = {server.kind for server in over_http.SERVERS}
    assert {"openvino", "vllm"} <= kinds & ENVIRONMENTS.keys()


class Words:
    """A tokenizer and chat template at once: a token per word."""

    def encode(self, messages):
        return " ".join(message["content"] for message in messages).split()


@pytest.fixture
def asking(monkeypatch):
    monkeypatch.setattr(over_http, "ChatTemplate", lambda *_: Words())
    return over_http.Asking(type("Model", (), {"chat_template": "", "tokenizer": None}))


def test_no_two_requests_begin_alike(asking):
    works = [asking.work(streams, streams, 8) for streams in (1, 16, 64, 1, 16, 64)]
    conversations = [body["messages"] for work in works for body in (*work.warm, *work.bodies)]
    conversations += [over_http.again(body["messages"]) for work in works for body in work.bodies]
    beginnings = [messages[0]["content"][:5] for messages in conversations]
    assert len(set(beginnings)) == len(beginnings) == 3 * 2 * 81
    assert [len(work.bodies) for work in works] == [1, 16, 64] * 2
    assert works[0].tokens == len(Words().encode(works[0].bodies[0]["messages"]))


def test_prompts_and_decoding_are_timed_apart():
    timing = over_http.Timing(arrivals=[0.5, 2.0], tokens=11)
    speeds = over_http.speeds(1.0, [timing] * 4, 3.0, prompts=200)
    assert (speeds["prompts"], speeds["decoding"], speeds["whole"]) == (200.0, 20.0, 44 / 3)
    failed = over_http.Timing(error="HTTP 500: no")
    with pytest.raises(RuntimeError, match="HTTP 500"):
        over_http.speeds(1.0, [timing, failed], 3.0, prompts=200)


@pytest.mark.parametrize("kind", ["llama.cpp", "ik_llama.cpp", "vllm", "forerun"])
def test_every_server_gets_streams_and_threads(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(servers, "llama_server", lambda kind: tmp_path / kind)
    monkeypatch.setattr(servers, "environment", lambda server: tmp_path / "bin" / "python")
    job = servers.Job(tmp_path / "x.gguf", tmp_path, threads=3, streams=7, context=100)
    for server in (server for server in servers.SERVERS if server.kind == kind):
        line = servers.command(server, job, 1234)
        words = line + list(servers.variables(server, job).values())
        assert {"1234", *server.flags} <= set(line) and "7" in line
        assert "3" in words or "0-2" in words


def test_a_server_is_visited_for_what_it_can_and_started_as_often_as_said(asking, monkeypatch):
    made = over_http.Rounds.__new__(over_http.Rounds)
    made._args = type("Args", (), {"streams": [1, 4], "single": 3, "tokens": 8})
    made._servers, made._asking = list(over_http.SERVERS), asking
    made._draw = over_http.np.random.default_rng(0)
    visits = [(server.name, tuple(works)) for server, works in made._visits()]
    once = [server.name for server in over_http.SERVERS if server.once]
    others = [server.name for server in over_http.SERVERS if not server.once]
    assert sorted(visits) == sorted(
        [(name, (1, 4)) for name in once] + [(name, (n,)) for name in others for n in (1, 4)]
    )
