"""Starting and ending servers, toys and commands, and talking to them over bare sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.forked import LocalForks

ROOT = Path(__file__).parents[2]

PYTHON = os.environ.get("FORERUN_PYTHON", sys.executable)
"""What servers run in: tests of clients run elsewhere (`make test-clients`)."""

PATIENCE = 300.0
"""Seconds for what should come soon: machines that test are slow, and busy with other things."""


HELD = ("running", "waiting", "pages_held")
"""What a server holds while it answers, by its own names."""


class Server:
    """A running server process and its address."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log
        self.root = url.removesuffix("/v1")
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port)
        self.http = httpx.Client(base_url=self.root, timeout=PATIENCE, trust_env=False)

    def healthy(self):
        assert self.process.poll() is None, self.logged()
        return self.http.get("/health").status_code == 200

    def post(self, path, body, **headers):
        return self.http.post(path, json=body, headers=headers)

    def complete(self, **body):
        return self.post("/v1/completions", {"prompt": "Hi", "temperature": 0, **body})

    def load(self, **named):
        """What the engine holds, by its own account; nothing where its model was let go. named:
        `model` where there are several.
        """
        answer = self.http.get("/server_info", params=named)
        if answer.status_code == 503 and answer.json()["error"]["code"] == "not_loaded":
            return dict.fromkeys(HELD, 0)
        return answer.json()["stats"]["load"]

    def idle(self):
        """Wait until nothing runs, waits or holds a page. True if that came."""
        return wait_for(lambda: not self.held())

    def held(self):
        load = self.load()
        return sum(load[name] for name in HELD)

    def own(self) -> list[int]:
        """Ids of its own processes: HTTP, and the engine where that has one."""
        return [self.process.pid, *self.children("engine", helpers=False)]

    def children(self, kind: str = "", helpers: bool = True) -> list[int]:
        """Ids of the processes that it or its engine has started, whose command line holds `kind`;
        without `helpers`, of those that it itself has.
        """
        everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        parents = self.own() if helpers else [self.process.pid]
        mine = [pid for pid in everybody if status(pid)[1:2] in ([str(id)] for id in parents)]
        pids = [pid for pid in mine if alive(pid) and kind in command_line(pid)]
        return [pid for pid in pids if pid not in parents]

    def connect(self, receive_buffer=None):
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        return sock

    def ends(self):
        """Wait for the end of the process; its exit code."""
        return self.process.wait(PATIENCE)

    def logged(self):
        self.log.seek(0)
        return self.log.read()


def wait_for(check, seconds=PATIENCE):
    """Poll until `check` says yes, less often the longer it takes: the other process has work to
    do. True if it did.
    """
    deadline, pause = time.monotonic() + seconds, 0.01
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(pause)
        pause = min(1.2 * pause, 0.1)
    return False


FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["tests.worlds.toy_server"])
"""One process imports what a toy server needs, which takes a second, and each server is a fork."""


class Forked:
    """A process that runs `main(options, report)` of toy_server, with what tests use of Popen's."""

    def __init__(self, options, log):
        self._receiver, receiver = FORKS.Pipe(duplex=False)
        given = options, str(log), dict(os.environ), receiver
        self._process = FORKS.Process(target=in_fork, args=given)
        self._process.start()
        receiver.close()
        self.pid = self._process.pid

    def address(self):
        """The server's URL, once it listens; empty where it ended before."""
        with suppress(EOFError):
            return self._receiver.recv()
        return ""

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        assert self.poll() is not None, "it still runs"
        return self.poll()

    def send_signal(self, sent):
        if self.poll() is None:  # Else its number may be another's.
            with suppress(ProcessLookupError):  # It has ended, unnoticed so far.
                os.kill(self.pid, sent)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def in_fork(options, log, environment, sender):
    """As if it had been started by a command line."""
    from forerun.client import engine_start
    from tests.worlds.toy_server import main  # In the fork: that is what takes a second.

    # Where it is the first thread that starts it.
    engine_start.subprocess = LocalForks().subprocess()

    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(options, sender.send)


class Started(subprocess.Popen):
    """The same by a command line, in another interpreter."""

    def __init__(self, options, log):
        line = [PYTHON, "-m", "tests.worlds.toy_server", json.dumps(options)]
        with Path(log).open("ab") as file:
            super().__init__(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True)

    def address(self):
        return self.stdout.readline().strip()


@contextmanager
def serving(tmp_path, wait=True, **options):
    """A toy server process; with `wait`, it is loaded."""
    path = tmp_path / f"server-{time.monotonic_ns()}.log"
    with path.open("w+") as log:
        process = (Forked if sys.executable == PYTHON else Started)(options, path)
        try:
            url = process.address()
            assert url, (log.seek(0), log.read())
            server = Server(process, url, log)
            if wait:
                assert wait_for(server.healthy), server.logged()
            yield server
        finally:
            process.kill()
            process.wait()


def run_program(program, **how):
    """Run a Python program in an interpreter of its own; return what came of it, as text."""
    line = [sys.executable, "-c", program]
    return subprocess.run(line, capture_output=True, check=False, text=True, **how)


@contextmanager
def started(line, log, wait=True, **popen):
    """The server of a command line that prints as JSON where it listens, which logs into a
    file; with `wait`, it is loaded.
    """
    line = [*line, "--port", "0", "--json"]
    with Path(log).open("w+") as file:
        popen = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": file, "text": True} | popen
        process = subprocess.Popen(line, **popen)
        try:
            text = ""
            while not text.rstrip().endswith("}"):
                piece = process.stdout.readline()
                assert piece, Path(log).read_text()
                text += piece
            server = Server(process, json.loads(text)["url"], file)
            if wait:
                assert wait_for(server.healthy), server.logged()
            yield server
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def sound(tmp_path, **options):
    """As `serving`: a server that has answered once, and at the end holds nothing and has logged no
    failure of its own.
    """
    with serving(tmp_path, **options) as server:
        assert server.complete(max_tokens=1).status_code == 200
        yield server
        assert server.idle()
        assert "Traceback" not in server.logged()


def request_bytes(path, body, **headers):
    """A POST as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "x", "content-type": "application/json", "content-length": len(data)}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def read_until(sock, mark):
    """Bytes up to and with `mark`, or to the end of the connection."""
    data = b""
    while mark not in data:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return data


def command_line(pid: int) -> str:
    """And its name, which alone is a fork's own."""
    try:
        parts = (Path(f"/proc/{pid}/{part}").read_bytes() for part in ("cmdline", "comm"))
        return b" ".join(parts).replace(b"\0", b" ").decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether it runs: neither gone nor a zombie."""
    return status(pid)[:1] not in ([], ["Z"])


def status(pid: int) -> list[str]:
    """Its state, its parent's id and what else /proc says; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
