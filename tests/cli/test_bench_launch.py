"""Asking whether a server is up, while it measures what its steps cost."""

import socket
import threading
from contextlib import contextmanager

import pytest

from forerun.measure import launch
from forerun.measure.launch import healthy
from forerun.options.config import EngineConfig
from tests.counted import lines


@contextmanager
def saying(answer):
    """The port of a server that says `answer` to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "up"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n", False),
        (b"", False),
        (b"what?\r\n\r\n", False),
    ],
)
def test_a_server_is_up_once_it_says_so(answer, up):
    with saying(answer) as port:
        assert healthy(port) is up


def test_asking_a_server_that_does_not_listen_is_next_to_no_work():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nobody listens.
        port = taken.getsockname()[1]
        assert not healthy(port)
        # 197; a client of httpx made for the question takes 1,527, and 18 ms instead of 0.03.
        assert lines(lambda: healthy(port)) < 400


def test_a_launched_server_has_the_options_of_its_command_line_alone(monkeypatch):
    """What the environment says is in that line, and a key or an address would lock bench out."""
    for name in ("FORERUN_API_KEY", "FORERUN_POLICY", "LLAMA_ARG_HOST", "VLLM_API_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "x")
    begun = []

    class Process:
        def __init__(self, line, env, **how):
            begun.append(env)

        def terminate(self):
            pass

        def wait(self, seconds):
            pass

    monkeypatch.setattr(launch.subprocess, "Popen", Process)
    monkeypatch.setattr(launch, "_came_up", lambda port, process: True)
    with launch.launched(EngineConfig(model="toy")):
        pass
    (env,) = begun
    assert env["HF_HOME"] == "x" and "PATH" in env
    assert not [name for name in env if name.startswith(("FORERUN", "LLAMA", "VLLM"))]
