"""Python programs as forks of a process that has imported what they import, instead of interpreters
that begin: seconds of processor time each.

They are children of the caller, with process ids, ends and stops of their own, and nothing but what
they are handed is open in them. Only for programs that start by their command line somewhere, too.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from fcntl import F_DUPFD, fcntl
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]


class Forking:
    """Starts forks; `fork` says of what."""

    def popen(self, command, **how):
        """As subprocess.Popen; a fork where it is `python -m MODULE` or `python -c SCRIPT`."""
        if command[0] != sys.executable or not self.able():
            return subprocess.Popen(command, **how)
        return Forked(self, command, **how)

    def subprocess(self):
        """In place of the module, for code that starts by `popen`."""
        return SimpleNamespace(**vars(subprocess) | {"Popen": self.popen})


class LocalForks(Forking):
    """Forks of this process, as long as it has one thread."""

    def able(self):
        return sys.platform == "linux" and len([*Path("/proc/self/task").iterdir()]) == 1

    def fork(self, files, line, session):
        """The process id. files: of this process, by the numbers that the fork is to have."""
        child = os.fork()
        if child == 0:
            _become(files, line, session)
        return child


READY = []
"""Sockets of processes that were forked for a ForkServer to come."""


def get_ready():
    """Fork what a ForkServer will ask, while this process has one thread: it has imported what this
    one has, and nothing of this one's is open in it.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            _open({1: os.open(os.devnull, os.O_WRONLY), 2: 2, 3: theirs.fileno()})
            os.closerange(4, 4096)
            gc.enable()
            main(3)
        finally:
            os._exit(0)
    theirs.close()
    READY.append(ours)


class ForkServer(Forking):
    """A process that has imported some modules and does nothing but fork."""

    def __init__(self, *modules):
        self._lock, self._process = Lock(), None
        if READY:
            self._ours = READY.pop()
            for module in modules:
                self._ours.send(json.dumps({"module": module}).encode())
                assert self._ours.recv(20)
            return
        self._ours, theirs = socket.socketpair()
        with theirs:
            line = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(line, cwd=ROOT, pass_fds=(theirs.fileno(),))

    def able(self):
        return sys.platform == "linux"

    def fork(self, files, **about):
        """The process id of a child of this process. files: by the numbers they are to have."""
        request = json.dumps(about | {"parent": os.getpid(), "numbers": list(files)}).encode()
        with self._lock:
            _adopt(True)  # A grandchild's whose parent has ended.
            try:
                socket.send_fds(self._ours, [request], list(files.values()))
                return int(self._ours.recv(20))
            finally:
                _adopt(False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ours.close()
        if self._process is not None:
            self._process.wait()


class Forked:
    """What is used of subprocess.Popen."""

    def __init__(
        self, nursery, command, stdin=None, stdout=None, pass_fds=(), start_new_session=False
    ):
        assert stdin in (None, subprocess.DEVNULL)
        self.returncode = self.stdout = None
        files = {number: number for number in (2, *pass_fds)}
        piped = stdout == subprocess.PIPE
        ours, files[1] = os.pipe() if piped else (None, os.dup(1))
        if stdout == subprocess.DEVNULL:
            files[1] = _nowhere(files[1])
        try:
            self.pid = nursery.fork(files, line=command[1:], session=start_new_session)
        finally:
            os.close(files[1])
        if piped:
            self.stdout = os.fdopen(ours, "rb")

    def communicate(self):
        """What it has written, when it has ended."""
        with self.stdout:
            said = self.stdout.read()
        self.wait()
        return said, None

    def wait(self):
        if self.returncode is None:
            with suppress(ChildProcessError):  # Another thread got the status.
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, sent):
        if self.returncode is None:
            os.kill(self.pid, sent)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _nowhere(file):
    """The number, of what swallows all."""
    os.close(file)
    return os.open(os.devnull, os.O_WRONLY)


def _adopt(orphans):
    subreaper = 36  # PR_SET_CHILD_SUBREAPER, prctl(2).
    ctypes.CDLL(None).prctl(subreaper, int(orphans))


def main(number, *modules):
    """Fork at every request, until no process can send one."""
    for module in modules:
        importlib.import_module(module)
    asking = socket.socket(fileno=int(number))
    while True:
        request, files, _, _ = socket.recv_fds(asking, 1 << 16, 16)
        if not request:
            return
        job = json.loads(request)
        if "module" in job:
            importlib.import_module(job["module"])
            asking.send(b"imported")
            continue
        child = os.fork()
        if child == 0:
            _between(asking, files, **job)
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


def _between(asking, files, parent, numbers, line, session):
    """Fork again and end: what is forked becomes a child of the caller."""
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        os.sched_yield()
    assert os.getppid() == parent
    asking.send(f"{os.getpid():20}".encode())
    _become(dict(zip(numbers, files, strict=True)), line, session)


def _become(files, line, session):
    """Run a program, and end."""
    status = 1
    try:
        if session:
            os.setsid()
        _open(files)
        named = 15  # PR_SET_NAME, prctl(2): /proc/PID/comm; the command line stays the parent's.
        ctypes.CDLL(None).prctl(named, line[1].rpartition(".")[2].encode())
        status = _run(*line)
        sys.stdout.flush()
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def _open(files):
    """These files and no others, by number; nothing to read."""
    files[0] = os.open(os.devnull, os.O_RDONLY)
    beyond = max(files) + 1
    apart = {number: fcntl(file, F_DUPFD, beyond) for number, file in files.items()}
    os.closerange(0, beyond)
    for number, file in apart.items():
        os.dup2(file, number)
        os.close(file)


def _run(kind, program, *arguments):
    sys.argv = [program if kind == "-m" else kind, *arguments]
    try:
        if kind == "-m":
            exec(find_spec(program).loader.get_code(program), {"__name__": "__main__"})
        else:
            exec(program, {"__name__": "__main__"})
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
