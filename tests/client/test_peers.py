"""The bench beside peers' servers: its requests and its figures."""

import asyncio
from pathlib import Path

import pytest

from bench.peers import over_http, servers
from bench.peers.environments import ENVIRONMENTS

PEERS = Path(over_http.__file__).parent


def failing(monkeypatch, *errors):
    """Let `measure` raise these, one after the other, and then answer."""
    left = list(errors)

    def measure(*_):
        if left:
            raise RuntimeError(left.pop(0))
        return {"whole": 1.0}

    monkeypatch.setattr(over_http, "measure", measure)


def test_a_dropped_connection_is_never_passed_over(monkeypatch, capsys):
    failing(monkeypatch, "ReadError: gone", "RemoteProtocolError: cut")
    answer = over_http.measure_patiently("peer", "http://x", None, 64, {})
    assert answer == {"whole": 1.0, "dropped": 2}
    said = capsys.readouterr().err
    assert said.count("dropped a connection") == 2 and "cut" in said


@pytest.mark.parametrize("errors", [["ReadError: gone"] * 3, ["HTTP 500: no"]])
def test_what_goes_on_or_is_no_connection_ends_the_visit(monkeypatch, errors):
    failing(monkeypatch, *errors)
    with pytest.raises(RuntimeError, match=errors[0][:5]):
        over_http.measure_patiently("peer", "http://x", None, 64, {})


def test_a_request_that_is_never_answered_is_a_dropped_one(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(over_http, "load_level", never)
    monkeypatch.setattr(over_http, "PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match="not all answers came") as raised:
        over_http.answered(None, [{}], 1)
    assert str(raised.value).startswith(over_http.DROPPED)


def test_what_the_steps_are_measured_with_can_be_made():
    for name in ("llamacpp", "onnx"):
        assert name in ENVIRONMENTS and (PEERS / f"steps_{name}.py").exists()
    kinds = {server.kind for server in over_http.SERVERS}
    assert {"openvino", "vllm"} <= kinds & ENVIRONMENTS.keys()


def test_no_two_requests_begin_alike_and_every_stream_has_answers_of_drawn_lengths():
    requests = over_http.Requests()
    works = [requests.work(streams, 4 * streams, 8) for streams in (1, 16, 64)]
    bodies = [body for work in works for body in (*work.warm, *work.bodies)]
    beginnings = [body["messages"][0]["content"][:5] for body in bodies]
    assert len(set(beginnings)) == len(beginnings) == 5 * 81
    assert [len(work.bodies) for work in works] == [4, 64, 256]
    lengths = [body["max_tokens"] for body in works[-1].bodies]
    assert (min(lengths), max(lengths)) == (4, 12) and 7.5 < sum(lengths) / len(lengths) < 8.5


def test_figures_are_of_all_requests_and_a_failed_one_is_an_error():
    timing = over_http.Timing(arrivals=[0.5, 2.0], tokens=11)
    actual = over_http.figures([timing] * 4, 3.0)
    assert (actual["whole"], actual["first_ms"], actual["token_ms"]) == (44 / 3, 500.0, 150.0)
    failed = over_http.Timing(error="HTTP 500: no")
    with pytest.raises(RuntimeError, match="HTTP 500"):
        over_http.figures([timing, failed], 3.0)


@pytest.mark.parametrize("kind", ["llama.cpp", "ik_llama.cpp", "vllm", "forerun"])
def test_every_server_gets_streams_and_threads(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(servers, "llama_server", lambda kind: tmp_path / kind)
    monkeypatch.setattr(servers, "environment", lambda server: tmp_path / "bin" / "python")
    job = servers.Job(tmp_path / "x.gguf", tmp_path, threads=3, streams=7, context=100)
    for server in (server for server in servers.SERVERS if server.kind == kind):
        line = servers.command(server, job, 1234)
        given = line + list(servers.variables(server, job).values())
        assert {"1234", *server.flags} <= set(line) and "7" in line
        assert "3" in given or "0-2" in given


def test_a_server_is_visited_for_what_it_can_and_started_as_often_as_declared():
    made = over_http.Rounds.__new__(over_http.Rounds)
    made._args = type("Args", (), {"streams": [1, 4], "requests": 3, "least": 1, "tokens": 8})
    made._servers, made._requests = list(over_http.SERVERS), over_http.Requests()
    made._draw = over_http.np.random.default_rng(0)
    visits = [(server.name, tuple(works)) for server, works in made._visits()]
    once = [server.name for server in over_http.SERVERS if server.once]
    others = [server.name for server in over_http.SERVERS if not server.once]
    assert sorted(visits) == sorted(
        [(name, (1, 4)) for name in once] + [(name, (n,)) for name in others for n in (1, 4)]
    )
