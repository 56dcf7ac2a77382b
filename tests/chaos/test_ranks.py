"""Any rank killed, stopped or out of memory, in any phase: waiting clients get an error within the
step, the process ends with a code and a sentence of its own, and nothing of it is left.

On the CPU, where nothing is captured: what a dead rank does to a replay is for bench/nccl.py.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median
from time import monotonic

import httpx
import pytest

from tests.models import tiny
from tests.parallel.test_failure import over
from tests.worlds.servers import PATIENCE, ROOT, command_line, status, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

LINE = ["--executor", "torch", "--device", "cpu", "--tp-size", "2", "--threads", "1"]
LINE += ["--context", "256", "--kv-tokens", "2048", "--max-sequences", "2"]
RANK = "tests.chaos.phased_rank"
STREAMS = 3
"""One more than run at once."""


def exhaust(pid):
    """What it allocates next is not there: what malloc keeps for later is used up (hoard)."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)


class Phased:
    """A server that has stopped at a phase.

    ranks  the process ids of ranks 0 and 1
    error_times   when each stream had its error
    """

    def __init__(self, folder, tmp_path, phase):
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(tmp_path / "phase"))
        self.listening.listen()
        self.listening.settimeout(PATIENCE)
        with socket.create_server(("127.0.0.1", 0)) as bound:
            self.port = bound.getsockname()[1]
        line = [sys.executable, "-m", "tests.chaos.serve_phased", str(tmp_path / "phase"), phase]
        line += ["serve", str(folder), "--port", str(self.port), *LINE]
        self.log = (tmp_path / "server.log").open("w+")
        self.process = subprocess.Popen(line, cwd=ROOT, stdout=self.log, stderr=self.log)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE, trust_env=False
        )
        self.received = [[] for _ in range(STREAMS)]
        self.error_times = []
        self.threads = []

    def ask(self):
        """Begin streams; each receives lines, in `received`."""
        for index in range(STREAMS):
            thread = threading.Thread(target=self._stream, args=(index,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _stream(self, index):
        body = {"prompt": f"a b c {index}", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            self.received[index].append(str(answer.status_code))
            for line in filter(None, answer.iter_lines()):
                self.received[index].append(line)
                if '"error"' in line:
                    self.error_times.append(monotonic())

    def at_phase(self):
        """Wait for it."""
        self.stopped, _ = self.listening.accept()
        everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        path = self.listening.getsockname()
        (engine,) = (pid for pid in everybody if f"phased_engine {path}" in command_line(pid))
        mine = [pid for pid in everybody if status(pid)[1:2] == [str(engine)]]
        (other,) = (pid for pid in mine if RANK in command_line(pid))
        self.ranks = engine, other

    def go_on(self):
        """Rank 0 goes on, if it can."""
        self.stopped.close()

    def logged(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.http.close()
        self.listening.close()
        self.log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_folder(tiny.model("llama"), tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def report(request):
    """Seconds from a fault to the last stream's error, and to the process's end, by cell. They are
    told at the end, and nothing depends on them.
    """
    seconds = {}
    yield seconds
    plugins = request.config.pluginmanager
    write = plugins.getplugin("terminalreporter").write_line
    errors = [error for error, _ in seconds.values() if error is not None]
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        write("\nseconds from the fault to the last error event, and to the end of the server:")
        for cell, (error, end) in seconds.items():
            write(f"  {cell:24} {'-' if error is None else f'{error:.2f}':>6} {end:.2f}")
        if errors:
            write(f"  error events: median {median(errors):.2f}, worst {max(errors):.2f}")


@pytest.fixture
def started(folder, tmp_path):
    servers = []

    def start(phase):
        servers.append(Phased(folder, tmp_path, phase))
        return servers[0]

    yield start
    for server in servers:
        server.close()


PHASES = ("load", "warm-up", "prefill", "decode")
FAULTS = kill, stop, exhaust


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_lost(started, report, phase, rank, fault):
    """A stopped one never continues: clients get their errors while it stands."""
    server = started(phase)
    serving = phase in ("prefill", "decode")
    if serving:
        assert wait_for(lambda: health(server) == 200 or server.process.poll() is not None)
        assert server.process.poll() is None, server.logged()
        server.ask()
    server.at_phase()
    assert wait_for(lambda: health(server) == (200 if serving else 503))
    began = monotonic()
    fault(server.ranks[rank])
    server.go_on()
    for thread in server.threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a stream waits for ever"
    for lines in server.received if serving else ():
        assert any('"error"' in line for line in lines), lines
        assert not any('"finish_reason":"length"' in line for line in lines)
    assert health(server) != 200
    # What ends before it is loaded may say that it could not be.
    codes = (6,) if serving or fault is not exhaust else (5, 6)
    assert server.process.wait(PATIENCE) in codes, server.logged()
    error = max(server.error_times) - began if serving else None
    report[f"{phase} {rank} {fault.__name__}"] = error, monotonic() - began
    last = server.logged().strip().splitlines()[-1]
    assert last.startswith("forerun: ")
    assert rank == 0 or "rank 1 of the tensor-parallel group" in server.logged()
    assert all(map(over, server.ranks))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()


def health(server):
    """Return the status of /health; 0: the server does not listen yet."""
    try:
        return server.http.get("/health").status_code
    except httpx.TransportError:
        return 0
