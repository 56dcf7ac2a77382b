"""The server as a user starts it: a process, a port, signals."""

import errno
import json
import resource
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from forerun.cli import serve, serve_begin
from forerun.cli.main import main
from forerun.cli.serve import read_keys
from forerun.errors import ConfigError, EngineError
from forerun.measure.launch import launched
from forerun.options.config import EngineConfig
from tests.worlds.servers import started, wait_for

SERVE = [sys.executable, "-m", "forerun.cli", "serve", "--model", "toy", "--kv-tokens", "4096"]


def when_ready(client, **options):
    """The answer of `/models` once the model is loaded."""
    while (answer := client.get("/models", **options)).status_code == 503:
        time.sleep(0.05)
    return answer


def test_an_engine_is_begun_before_anything_heavy_is_imported():
    names = "forerun.cli.command_line, forerun.cli.serve_begin"
    heavy = "{'numpy', 'starlette', 'rich', 'forerun.build'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"import sys, {names}; print({heavy})"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "set()"


def test_a_server_that_cannot_begin_leaves_no_engine(monkeypatch, capsys):
    """Nor does one that is interrupted while it loads its own code."""
    begun = []

    class RecordedStart(serve_begin.EngineStart):
        def __init__(self, *command):
            super().__init__((sys.executable, "-c", "input()"))
            begun.append(self)

    def interrupted(arguments, program, begun):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_begin, "EngineStart", RecordedStart)
    assert main(["serve", "nosuch.gguf", "--port", "0"]) == 3
    assert "nosuch.gguf" in capsys.readouterr().err
    monkeypatch.setattr(serve, "main", interrupted)
    assert main(["serve", "toy", "--port", "0"]) == 130
    assert [one.process.returncode is not None for one in begun] == [True, True]
    assert main(["serve", "toy", "--no-engine-process", "--port", "0"]) == 130
    assert main(["serve", "toy", "nosuch.gguf", "--port", "0"]) == 130
    assert len(begun) == 2


def test_a_server_answers_on_a_port_it_found_and_ends_on_sigterm(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who may enter\nsecret\n\n")
    line = [*SERVE, "--api-key-file", str(keys)]
    with started(line, tmp_path / "log", wait=False) as server:
        transport = httpx.HTTPTransport(retries=3)
        with httpx.Client(transport=transport, base_url=server.url, timeout=120) as client:
            assert client.get("/models").status_code == 401
            key = {"Authorization": "Bearer secret"}
            answer = when_ready(client, headers=key)
            assert answer.json()["data"][0]["id"] == "toy"
            body = {"prompt": "Hi", "max_tokens": 5, "temperature": 0}
            text = client.post("/completions", json=body, headers=key).json()["choices"][0]["text"]
            assert text == "djell"
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        log = server.logged()
    assert log.count("GET /v1/models") == 1, "a refusal has a line, a page view has none"
    assert "uvicorn" not in log
    shown = [line.split()[0] for line in log.splitlines() if line.startswith("  ")]
    assert shown == ["model", "executor", "draft", "memory", "context", "ready"]


def test_where_it_cannot_listen_is_a_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "toy", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"forerun: port {port} on 127.0.0.1 is taken by another program; choose another with "
        "--port, or let --port 0 find a free one.\n"
    )
    assert main(["serve", "--model", "toy", "--host", "no.such.host.invalid"]) == 2
    stderr = capsys.readouterr().err
    assert "forerun: cannot listen on no.such.host.invalid, port 8000: " in stderr
    assert "Traceback" not in stderr


def test_a_server_that_does_not_start_shows_its_log():
    broken = EngineConfig(model="toy", kv_tokens=10**12)
    with pytest.raises(EngineError, match="kv-tokens"), launched(broken):
        pass


def test_bench_measures_a_server_of_its_own(capsys):
    line = ["--model", "toy", "--kv-tokens", "8192", "--max-sequences", "16"]
    line += ["--concurrency", "1,8", "--requests", "8", "--repeats", "1", "--max-tokens", "60"]
    # Its prompts are new ones every time, and a random model ends some answers at once.
    line += ["--ignore-eos"]
    assert main(["bench", "--launch", *line, "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert [(level["side"], level["at_once"]) for level in levels] == [
        ("on", 1), ("off", 1), ("on", 8), ("off", 8),
    ]  # fmt: skip
    assert all(level["errors"] == 0 and level["tokens"] > 100 for level in levels)
    # An answer whose text came in one piece has none.
    assert any(level["per_token_ms"].get("p50", 0) > 0 for level in levels)


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("a\n # no\n b \n")
    assert read_keys(path) == ("a", "b")
    path.write_text("# nothing\n")
    for bad in (path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=bad.name):
            read_keys(bad)


def test_more_connections_than_a_shell_allows_files(tmp_path):
    """Three hundred idle ones, where the shell's limit is 128: the next client is served."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))  # noqa: E731
    with started(SERVE, tmp_path / "log", wait=False, preexec_fn=few) as server:
        idle = [server.connect() for _ in range(300)]
        assert wait_for(server.healthy)
        for sock in idle:
            sock.close()


SWALLOWED = """
import os, signal, sys, time
from forerun.cli import main, serve_begin

def begin(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except BaseException:
        print("went on", flush=True)

serve_begin.main = begin
sys.argv = ["forerun", "serve", "toy"]
main.console()
"""


def test_a_signal_that_an_import_catches_ends_a_server_that_does_not_run_yet():
    line = [sys.executable, "-c", SWALLOWED]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("tokenizers.abi3.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=repr,
)
def test_a_process_without_memory_says_so_in_a_sentence(monkeypatch, capsys, error):
    def begin(_):
        raise error

    monkeypatch.setattr(serve_begin, "main", begin)
    assert main(["serve", "toy"]) == 4
    assert "gives this process no more memory" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("error", [RuntimeError("x"), ImportError("x"), OSError(errno.EIO, "x")])
def test_other_errors_are_no_want_of_memory(monkeypatch, error):
    def begin(_):
        raise error

    monkeypatch.setattr(serve_begin, "main", begin)
    with pytest.raises(type(error)):
        main(["serve", "toy"])
