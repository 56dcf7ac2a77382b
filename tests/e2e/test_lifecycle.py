"""How a server starts, refuses, drains and ends."""

import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.worlds.servers import read_until, request_bytes, serving, wait_for

BODY = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "speculative": {"enabled": False}}


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


def test_listens_while_it_loads(tmp_path):
    loads = tmp_path / "loads"
    with serving(tmp_path, wait=False, load_when=str(loads)) as server:
        for path in ("/health", "/v1/models", "/server_info"):
            answer = server.http.get(path)
            assert code_of(answer) == (503, "loading")
            assert int(answer.headers["retry-after"]) >= 1
        assert code_of(server.complete(max_tokens=1)) == (503, "loading")
        assert server.http.get("/version").status_code == 200
        assert "process_cpu_seconds_total" in server.http.get("/metrics").text
        loads.touch()
        assert wait_for(lambda: server.http.get("/health").status_code == 200)
        assert server.complete(max_tokens=1).status_code == 200


def test_ends_when_loading_fails(tmp_path):
    with serving(tmp_path, wait=False, load_error="no such model here") as server:
        assert server.ends() == 3
        assert server.logged().splitlines()[-1] == "error: no such model here"


def test_a_signal_while_loading_ends_it(tmp_path):
    with serving(tmp_path, wait=False, load_when="never") as server:
        assert wait_for(lambda: server.http.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        assert "never retrieved" not in server.logged()


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_drains(tmp_path, sent):
    """Running requests end as usual, new ones get 503, then the process ends with 0."""
    with serving(tmp_path, delay=0.02) as server:
        whole = server.complete(**BODY, max_tokens=100).json()["choices"][0]["text"]

        def ask(stream):
            with httpx.Client(base_url=server.root, timeout=60, trust_env=False) as client:
                body = {**BODY, "max_tokens": 100, "stream": stream}
                return client.post("/v1/completions", json=body)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(ask, stream) for stream in (False, True)]
            assert wait_for(lambda: server.load()["running"] == 2)
            server.process.send_signal(sent)
            assert wait_for(lambda: server.http.get("/health").status_code == 503)
            assert code_of(server.http.get("/health")) == (503, "shutting_down")
            assert code_of(server.complete(max_tokens=1)) == (503, "shutting_down")
            answer, streamed = (each.result(60) for each in futures)
        assert (answer.status_code, streamed.status_code) == (200, 200)
        assert answer.json()["choices"][0]["text"] == whole
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.ends() == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(server.root + "/health", trust_env=False)


def test_draining_has_an_end(tmp_path):
    """What still runs then is cut short: an error for whole answers, an error event in streams."""
    settings = {"drain_seconds": 0.3}
    with serving(tmp_path, delay=0.01, settings=settings) as server:
        body = {**BODY, "max_tokens": 4000}
        whole, stream = server.connect(), server.connect()
        whole.sendall(request_bytes("/v1/completions", body))
        stream.sendall(request_bytes("/v1/completions", {**body, "stream": True}))
        assert wait_for(lambda: server.load()["running"] == 2)
        server.process.send_signal(signal.SIGINT)
        refused, cut = read_until(whole, b"}}"), read_until(stream, b"[DONE]")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"code":"shutting_down"' in refused
        assert cut.startswith(b"HTTP/1.1 200")
        assert b'data: {"error":' in cut
        assert b'"code":"shutting_down"' in cut
        assert server.ends() == 0


def test_a_second_signal_ends_it_at_once(tmp_path):
    settings = {"drain_seconds": 600}
    with serving(tmp_path, delay=0.2, settings=settings) as server, server.connect() as sock:
        sock.sendall(request_bytes("/v1/completions", {**BODY, "max_tokens": 4000}))
        assert wait_for(lambda: server.load()["running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: server.http.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        # Alone, the first would have left the request ten minutes.
        assert server.process.wait(120) == 128 + signal.SIGTERM


def test_an_idle_server_ends_quickly_with_connections_open(tmp_path):
    with serving(tmp_path) as server, server.connect():
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        assert "graceful shutdown exceeded" not in server.logged()


def test_a_client_that_leaves_costs_one_step_more(tmp_path):
    """The step that runs when it leaves is the last but, at most, the one already planned."""
    with serving(tmp_path, delay=0.8) as server:
        sock = server.connect()
        sock.sendall(request_bytes("/v1/completions", {**BODY, "max_tokens": 4000}))
        assert wait_for(lambda: server.load()["running"] == 1)

        def stats():
            return server.http.get("/server_info").json()["stats"]

        before = stats()["steps"]
        sock.close()
        assert wait_for(lambda: stats()["finished"]["abort"] == 1)
        assert stats()["steps"] <= before + 2
        assert stats()["load"]["pages_held"] == 0


def test_an_engine_that_dies(tmp_path):
    with serving(tmp_path, poison=0x21) as server:
        assert server.complete(max_tokens=3).status_code == 200
        answer = server.complete(prompt="a!", max_tokens=3)
        assert code_of(answer) == (500, "engine_error")
        for _ in range(2):
            streamed = server.complete(max_tokens=3, stream=True)
            assert streamed.status_code == 500  # Nothing had been sent, so it is no 200.
        assert wait_for(lambda: server.http.get("/health").status_code == 503)
        assert code_of(server.http.get("/health")) == (503, "engine_stopped")
        assert code_of(server.complete(max_tokens=3)) == (503, "engine_stopped")
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/server_info").json()["state"] == "stopped"
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0


def test_api_keys(tmp_path):
    with serving(tmp_path, settings={"api_keys": ["one-key", "two-key"]}) as server:
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/health").status_code == 200
        paths = ("/v1/models", "/models", "/metrics", "/server_info", "/version", "/nothing")
        for path in paths:
            answer = server.http.get(path)
            assert code_of(answer) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer wrong", "one-key", "Basic one-key", "Bearer", "Bearer one-key2"):
            answer = server.http.get("/v1/models", headers={"authorization": given})
            assert code_of(answer) == (401, "invalid_api_key")
        raw = server.http.get("/v1/models", headers={"authorization": "Bearer schlüssel".encode()})
        assert raw.status_code == 401
        for key in ("one-key", "two-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
            info = server.http.get("/server_info", headers=headers)
            assert info.json()["settings"]["api_keys"] == 2
            assert not any(secret in info.text for secret in ("one-key", "two-key"))


def test_a_full_queue(tmp_path):
    config = {"max_sequences": 1, "max_waiting": 1}
    with serving(tmp_path, delay=0.02, config=config) as server:
        socks = [server.connect() for _ in range(2)]
        for sock, name in zip(socks, ("running", "waiting"), strict=True):
            sock.sendall(request_bytes("/v1/completions", {**BODY, "max_tokens": 4000}))
            assert wait_for(lambda name=name: server.load()[name] == 1)
        answer = server.complete(max_tokens=1)
        assert code_of(answer) == (429, "queue_full")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        # Of several prompts none may be left behind when one is refused.
        assert server.complete(prompt=["a", "b", "c"], max_tokens=1).status_code == 429
        for sock in socks:
            sock.close()
        assert server.idle()
        assert server.complete(max_tokens=1).status_code == 200


def test_requests_have_a_time_limit(tmp_path):
    settings = {"request_seconds": 0.4}
    with serving(tmp_path, delay=0.02, settings=settings) as server:
        assert code_of(server.complete(**BODY, max_tokens=4000)) == (504, "timeout")
        streamed = server.complete(**BODY, max_tokens=4000, stream=True).text
        assert '"code":"timeout"' in streamed
        assert streamed.endswith("data: [DONE]\n\n")
        assert server.idle()


def test_served_name(tmp_path):
    settings = {"served_name": ("org/mine", "short"), "strict_model_names": True}
    with serving(tmp_path, settings=settings) as server:
        cards = server.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["org/mine", "short"]
        assert server.http.get("/v1/models/org/mine").status_code == 200
        for name in ("org/mine", "short"):
            assert server.complete(model=name, max_tokens=1).json()["model"] == "org/mine"
        assert server.complete(model="toy", max_tokens=1).status_code == 404
        assert 'model_name="org/mine"' in server.http.get("/metrics").text


def test_with_one_model_any_name_is_its_name(toy_server):
    for name in ("toy", "glm-4.5", "meta-llama/Llama-3.1-8B-Instruct"):
        assert toy_server.complete(model=name, max_tokens=1).json()["model"] == "toy"
    assert toy_server.http.get("/v1/models/glm-4.5").status_code == 404


def test_no_file_can_be_opened_any_more(tmp_path):
    """It is said once, requests that run go on, and newcomers are answered: the connections that
    have been idle for longest make room.
    """
    with serving(tmp_path) as server:
        hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, hard))
        with ExitStack() as stack:
            asking = stack.enter_context(server.connect())
            asking.sendall(request_bytes("/v1/completions", b"{", content_length=99))
            socks = [stack.enter_context(server.connect()) for _ in range(100)]
            assert wait_for(lambda: "no new connection can be accepted" in server.logged())
            newest = stack.enter_context(server.connect())
            newest.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_until(newest, b"\r\n").startswith(b"HTTP/1.1 200")
            assert socks[0].recv(1) == b"", "idle for longest"
            asking.setblocking(False)
            with pytest.raises(BlockingIOError):
                asking.recv(1)
        assert server.complete(max_tokens=5).status_code == 200
        log = server.logged()
        assert log.count("no new connection can be accepted") == 1 and "Traceback" not in log
