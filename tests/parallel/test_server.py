"""A server whose rank is gone: every stream hears it, and the process ends with a code and a
sentence of its own. `/health` speaks for all ranks.
"""

import os
import signal
import threading

import pytest

from tests.models import tiny
from tests.parallel.test_failure import over
from tests.worlds.servers import PATIENCE, PYTHON, started


@pytest.fixture
def server(tmp_path):
    folder = tiny.save_folder(tiny.model("llama"), tmp_path / "made")
    line = [PYTHON, "-m", "forerun", "serve", str(folder), "--executor", "torch", "--device", "cpu"]
    line += ["--tp-size", "2", "--threads", "1", "--context", "256", "--kv-tokens", "2048"]
    with started([*line, "--policy", "fixed"], tmp_path / "server.log") as running:
        yield running


def stream(server, begun, events):
    """The events of a long answer; `begun` is set at the first."""
    body = {"prompt": "a b c", "max_tokens": 220, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                begun.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_gone_ends_the_server(server, sent):
    pid = server.http.get("/server_info").json()["executor"]["ranks"][0]["pid"]
    received = [[], [], []]
    streams = [(threading.Event(), events) for events in received]
    threads = [threading.Thread(target=stream, args=(server, *each)) for each in streams]
    for thread in threads:
        thread.start()
    assert all(begun.wait(PATIENCE) for begun, _ in streams)
    os.kill(pid, sent)
    for thread in threads:
        thread.join(PATIENCE)
    failed = [e for e in received if any("rank 1 of the tensor-parallel group was" in x for x in e)]
    ended = [e for e in received if e not in failed and any('"length"' in x for x in e)]
    assert failed and len(failed) + len(ended) == len(received)
    assert server.ends() == 6
    assert over(pid)
    last = server.logged().strip().splitlines()[-1]
    assert last.startswith("forerun: rank 1 of the tensor-parallel group was ")


@pytest.mark.slow
def test_a_server_that_ends_leaves_no_rank(server):
    pid = server.http.get("/server_info").json()["executor"]["ranks"][0]["pid"]
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 0
    assert over(pid)
