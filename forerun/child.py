"""Detects the end of a child process from the system's report to its parent, without heartbeats."""

import os
import signal
import subprocess
from contextlib import suppress
from time import sleep

STOPPED_SECONDS = 1.0
"""Seconds within which a stopped process may continue. A working process is never stopped: only
SIGSTOP and similar signals stop one. An attached debugger does not count: the system reports to it
instead of the parent.
"""
LOOK = 0.05
"""Seconds between two checks of a stopped process."""


def wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the end of a child process and set its `returncode`; no other code may wait for it.
    A child that stays stopped for STOPPED_SECONDS is killed. Returns the signal that stopped it for
    so long, 0 if it ended otherwise.
    """
    stopped = 0
    while True:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED)
        assert found is not None
        if found.si_code not in (os.CLD_STOPPED, os.CLD_TRAPPED):
            exited = found.si_code == os.CLD_EXITED
            process.returncode = found.si_status if exited else -found.si_status
            return stopped
        if _stays(process.pid):
            stopped = found.si_status
            os.kill(process.pid, signal.SIGKILL)


def _stays(pid: int) -> bool:
    """Return whether a stopped child neither continues nor ends within STOPPED_SECONDS."""
    what = os.WEXITED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT
    for _ in range(round(STOPPED_SECONDS / LOOK)):
        if os.waitid(os.P_PID, pid, what) is not None:
            return False
        sleep(LOOK)
    return True


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a child process, stopped or not. Does nothing if it has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
