"""Server and engine in two processes: the same answers as in one, and what the end of one does."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.dialects.requests import MESSAGES, PLACE
from tests.e2e.test_lifecycle import BODY, code_of
from tests.worlds.servers import alive, read_until, request_bytes, serving, wait_for

LONG = {**BODY, "max_tokens": 4000}
BIAS = {str(token): 0.5 for token in range(200)}
DRAWN = {"temperature": 0.9, "seed": 7, "max_tokens": 40}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PLACE}}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": PLACE}}]
REQUESTS = {
    "completion": ("/v1/completions", {"prompt": ["Hi", "So"], "n": 2, "logprobs": 2, **DRAWN}),
    "echo": ("/v1/completions", {"prompt": "Hi", "echo": True, "logprobs": 1, **DRAWN}),
    "stop": ("/v1/completions", {"prompt": "Hi", "temperature": 0, "stop": ["el"]}),
    "bias": ("/v1/completions", {"prompt": "Hi", "logit_bias": BIAS, **DRAWN}),
    "trace": ("/v1/completions", {"prompt": "ababab", "speculative": {"trace": True}, **DRAWN}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, **DRAWN}),
    "schema": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA, **DRAWN}),
    "tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **DRAWN},
    ),
    "responses": ("/v1/responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 30}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "temperature": 0, "max_tokens": 30}),
    "ollama": (
        "/api/chat",
        {"messages": MESSAGES, "options": {"temperature": 0, "num_predict": 30}},
    ),
    "sglang": (
        "/generate",
        {"text": "Hi", "sampling_params": {"temperature": 0, "max_new_tokens": 30}},
    ),
    "too long": ("/v1/completions", {"prompt": "Hi", "max_tokens": 10**6}),
    "no schema": ("/v1/completions", {"prompt": "Hi", "structured_outputs": {"regex": "(((("}}),
    "not a token": ("/v1/completions", {"prompt": "Hi", "logit_bias": {"999": 1}}),
}
"""Of every dialect and of whatever crosses between the processes: route and body."""

CHANGING = {
    "id", "created", "created_at", "completed_at", "system_fingerprint", "ms", "request_id",
    "item_id", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration",
    "e2e_latency", "response_id", "call_id", "reason", "allowed",
}  # fmt: skip
"""Names of what is another thing each time."""


def constant(value):
    if isinstance(value, dict):
        return {name: constant(v) for name, v in value.items() if name not in CHANGING}
    return [constant(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    # Without the n-gram cache: what is drafted depends on the order in which others end.
    both = {"config": {"speculative_ngram_capacity": 0}}
    one = {"settings": {"engine_process": False}}
    with (
        serving(tmp_path_factory.mktemp("one"), **one, **both) as alone,
        serving(tmp_path_factory.mktemp("two"), **both) as parted,
    ):
        assert alone.own() == [alone.process.pid] and len(parted.own()) == 2
        yield alone, parted
        assert alone.idle() and parted.idle()
        assert "Traceback" not in alone.logged() + parted.logged()


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_the_same_in_one_process_and_in_two(both, name):
    route, body = REQUESTS[name]
    body = {**body, "stream": False}
    one, two = (server.post(route, body) for server in both)
    assert one.status_code == two.status_code
    assert constant(one.json()) == constant(two.json())


def test_health_knows_both_processes(both):
    for server in both:
        health = server.http.get("/health").json()
        assert {health["server_pid"], health["engine_pid"]} == set(server.own())
    alone, parted = (server.http.get("/server_info").json() for server in both)
    assert alone["drafter"] == parted["drafter"] and alone["memory"] == parted["memory"]
    assert alone["config"] == parted["config"]


def running(server, count):
    """Streams that have begun; each has its first piece."""
    socks = [server.connect() for _ in range(count)]
    for sock in socks:
        sock.sendall(request_bytes("/v1/completions", {**LONG, "stream": True}))
        assert b"data: " in read_until(sock, b"data: ")
    return socks


def test_an_engine_that_is_killed(tmp_path):
    """Every open stream ends in an error, the server with a sentence and a code of its own."""
    with serving(tmp_path, delay=0.01) as server, ThreadPoolExecutor() as pool:
        socks, (engine,) = running(server, 6), server.own()[1:]
        whole = pool.submit(server.complete, **LONG)
        assert wait_for(lambda: server.load()["running"] == 7)
        os.kill(engine, signal.SIGKILL)
        for sock in socks:
            end = read_until(sock, b"[DONE]")
            assert b'"code":"engine_stopped"' in end and b"killed by SIGKILL" in end
        assert code_of(whole.result()) == (503, "engine_stopped")
        assert server.ends() == 6
        assert not alive(engine)
        last = server.logged().splitlines()[-1]
        assert last.startswith("error: The engine's process was killed by SIGKILL")
        assert "Traceback" not in server.logged()


def test_an_engine_that_is_killed_while_it_loads(tmp_path):
    with serving(tmp_path, wait=False, load_when="never") as server:
        assert wait_for(lambda: server.own()[1:])
        os.kill(server.own()[1], signal.SIGBUS)  # What reading a model that is cut meanwhile does.
        assert server.ends() == 6
        assert "was killed by SIGBUS, as where a file is cut" in server.logged()


def test_a_server_that_is_killed_leaves_nothing_behind(tmp_path):
    """The engine ends in the middle of its steps, or of loading."""
    for options in ({"delay": 0.01}, {"load_when": "never", "wait": False}):
        with serving(tmp_path, **options) as server:
            assert wait_for(lambda server=server: server.own()[1:])
            socks, (engine,) = running(server, 3 if "delay" in options else 0), server.own()[1:]
            server.process.kill()
            assert wait_for(lambda engine=engine: not alive(engine))
            for sock in socks:
                assert b"[DONE]" not in read_until(sock, b"[DONE]")


def test_signals_to_all_of_a_group_are_the_servers(tmp_path):
    """What systemd or a terminal sends to both drains, as if the server alone had got it."""
    with serving(tmp_path, delay=0.01) as server, ThreadPoolExecutor() as pool:
        future = pool.submit(server.complete, **{**BODY, "max_tokens": 200})
        assert wait_for(lambda: server.load()["running"] == 1)
        for pid in reversed(server.own()):
            os.kill(pid, signal.SIGTERM)
        assert future.result().json()["usage"]["completion_tokens"] == 200
        assert server.ends() == 0


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A server, and a function: how many steps it has made."""
    path = tmp_path_factory.mktemp("steps")
    with serving(path, delay=0.002, steps=str(path / "steps")) as server:
        yield server, lambda: (path / "steps").stat().st_size
        assert server.idle()


def test_no_step_waits_for_the_server(counted):
    """The server is stopped; its engine goes on, and nothing of the answer is lost."""
    server, steps = counted
    whole = server.complete(**{**BODY, "max_tokens": 500}).json()["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        future = pool.submit(server.complete, **{**BODY, "max_tokens": 500})
        assert wait_for(lambda: server.load()["running"] == 1)
        server.process.send_signal(signal.SIGSTOP)
        before = steps()
        assert wait_for(lambda: steps() >= before + 100)
        server.process.send_signal(signal.SIGCONT)
        assert future.result().json()["choices"][0]["text"] == whole


@pytest.mark.parametrize("what", ["prompt", "logit_bias", "messages"])
def test_four_megabytes_do_not_touch_a_step(counted, what):
    """While the server is at such a body, steps go on."""
    big = 4_000_000
    route, body = {
        "prompt": ("/v1/completions", {"prompt": "x " * (big // 2)}),
        "logit_bias": (
            "/v1/completions",
            {"prompt": "Hi", "logit_bias": {str(n): 0.5 for n in range(big // 14)}},
        ),
        "messages": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * (big // 40)},
        ),
    }[what]
    server, steps = counted
    with ThreadPoolExecutor() as pool:
        (sock,) = running(server, 1)
        future = pool.submit(server.post, route, {**body, "max_tokens": 1})
        before = steps()
        assert future.result().status_code == 400
        assert steps() > before
        sock.close()
        assert server.idle()


def test_an_engine_that_says_nothing_is_stuck_and_may_come_back(tmp_path):
    with serving(tmp_path, settings={"watchdog_seconds": 1.0}) as server:
        (engine,) = server.own()[1:]
        os.kill(engine, signal.SIGSTOP)
        assert wait_for(lambda: server.http.get("/health").status_code == 503)
        assert code_of(server.http.get("/health")) == (503, "engine_stuck")
        assert code_of(server.complete(max_tokens=1)) == (503, "engine_stuck")
        assert server.http.get("/metrics").status_code == 200
        os.kill(engine, signal.SIGCONT)
        assert wait_for(server.healthy)
        assert server.complete(max_tokens=1).status_code == 200


def test_a_stopped_engine_does_not_keep_the_server_from_ending(tmp_path):
    with serving(tmp_path) as server:
        (engine,) = server.own()[1:]
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        assert not alive(engine)
