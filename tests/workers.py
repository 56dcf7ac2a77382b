"""Workers of pytest-xdist as forks of the process that hands out the tests, once it has imported
every file of tests: otherwise each of them imports all of these and the libraries they need, and in
a fresh clone compiles them.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.forked import get_ready

ROOT = Path(__file__).parents[1]


def fork_workers(config, specs):
    """Make the workers that are about to be needed. None where something that was imported has
    started a thread, which a fork would lack: then they begin as ever. Which did?
    """
    import_tests(config.args, config.getoption("ignore") or ())
    threads = len([*Path("/proc/self/task").iterdir()]) if sys.platform == "linux" else 0
    if threads != 1 or any(not spec.popen or spec.python or spec.chdir for spec in specs):
        return
    gateways = importlib.import_module("execnet.gateway_io")
    gc.freeze()  # What is there is no garbage, and stays where all processes share it.
    forks, others = [], gateways.create_io
    for _ in specs:
        forks.append(Fork([file for fork in forks for file in fork.files]))

    def create_io(spec, execmodel):
        # Later ones replace a worker that has crashed.
        return forks.pop(0).io(execmodel) if forks else others(spec, execmodel)

    gateways.create_io = create_io


def say_less(config):
    """A worker tells of a test how it went and that it is over; not that it began, that what is
    around it passed, or output of one that did, which is not read.
    """
    options = config.option
    if options.verbose > 0 or options.durations or options.xmlpath or "P" in options.reportchars:
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = partial(_tell, plugin.sendevent)


def _tell(send, name, **about):
    data = about.get("data", {})
    if name in ("logstart", "logfinish"):
        return
    if name == "testreport" and data["outcome"] == "passed":
        if data["when"] != "call":
            return
        data |= {"keywords": {}, "sections": [], "user_properties": []}
    send(name, **about)


def import_tests(places, ignored):
    """What cannot be imported is imported again by a worker, which says so."""
    ignored = [Path(path).resolve() for path in ignored]
    for folder in (Path(place.partition("::")[0]).resolve() for place in places):
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
        for path in files:
            if path.name.startswith(("test_", "conftest")) and not ignored_by(path, ignored):
                with suppress(Exception, pytest.skip.Exception):
                    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def ignored_by(path, folders):
    return any(path.is_relative_to(folder) for folder in folders)


class Fork:
    """A worker that gets its work as a line of Python, as one of execnet does.

    files  this process's ends of what it reads and writes
    """

    def __init__(self, alien):
        """alien: the ends of other workers, which it does not keep open."""
        (stdin, tell), (hear, said) = os.pipe(), os.pipe()
        self.files = tell, hear
        self.pid = os.fork()
        if self.pid == 0:
            work(stdin, said, [*alien, tell, hear])
        os.close(stdin)
        os.close(said)

    def io(self, execmodel):
        """What execnet speaks to it by."""
        base = importlib.import_module("execnet.gateway_base")
        tell, hear = (
            os.fdopen(file, mode) for file, mode in zip(self.files, ("wb", "rb"), strict=True)
        )
        made = base.Popen2IO(tell, hear, execmodel)
        made.wait, made.kill = self.wait, self.kill
        return made

    def wait(self):
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def work(requests, said, alien):
    """Be a worker, and end as a program does."""
    status = 1
    try:
        for number, file in enumerate((requests, said)):
            os.dup2(file, number)
        for file in (requests, said, *alien):
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
        get_ready()
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        status = 0
    finally:
        if status:
            traceback.print_exc()
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(status)
