"""A process that can be killed, for work whose cost depends on untrusted input.

It reads one line of JSON per request from standard input and answers each with one line of JSON.
Before it answers it may ask a question itself: a line `{"question": ...}`, which gets one line as
an answer. Its limit is processor time, which does not depend on other load of the machine.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Any

from forerun.errors import EngineError

START_SECONDS = 120.0
"""Seconds for a process to become ready; some libraries take long to load."""

STARTS = 4
"""Most starts of a process that is ended from outside before it is ready."""

SILENCE = 12.0
"""A process is ended when it has neither answered nor used the processor for this many times the
processor time that it may take: it is blocked. On a busy machine one that runs now and then
continues.
"""

LOOK = 1.0
"""Seconds between two checks of a process that has not answered. One that is stopped (SIGSTOP) at
two consecutive checks is ended.
"""


class Fault(StrEnum):
    """Why there is no answer."""

    TIME = "it takes more than {seconds:g} seconds of processor time"
    TOTAL = "it has used too much processor time in total"
    DIED = "the process that it runs in ended, perhaps for lack of memory"
    KILLED = "the process that it runs in was ended from outside"
    SILENT = "the process that it runs in did not answer in time"

    @property
    def ours(self) -> bool:
        """Whether the request was not the cause, so that it may be tried again."""
        return self in (Fault.KILLED, Fault.SILENT)

    def words(self, seconds: float) -> str:
        """Return the reason as text for an error message. seconds: processor time that an answer
        may take.
        """
        return self.value.format(seconds=seconds)


Questions = Callable[[Any], Any]
"""Answers a process's question; JSON values. Called on the thread that waits for its answer."""


class SandboxProcess:
    """A process that is started on first use, killed when an answer takes too long, then started
    again; also if it is killed before it is ready, since no state was lost. Not locked.

    command  starts it; `seconds` is added as an argument
    seconds  of processor time that an answer may take
    init_message  the first line it reads, which it answers when it is ready; None = none
    questions  answers its questions
    stateful  its state matters: once it is ready it is not started again
    fault    why the last answer did not come
    """

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        init_message: str | None = None,
        questions: Questions | None = None,
        stateful: bool = False,
    ) -> None:
        self.seconds = seconds
        self.fault: Fault | None = None
        self._command, self._init_message = command, init_message
        self._questions, self._stateful = questions, stateful
        self._process: subprocess.Popen[str] | None = None
        self._killed = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send one request, JSON values, and wait for the answer; starts the process if needed.
        Returns None if it took too long or the process died: `fault` has the reason. Raises
        EngineError if no process can be started, and what `questions` raises.
        """
        process = self._process if self._stateful and self._process else self._running()
        line = self._ask_once(process, json.dumps(request), SILENCE * self.seconds)
        if not line:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, if there is one. Unless it is stateful, the next request starts
        another.
        """
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()

    def kill(self) -> None:
        """End the process permanently, from any thread: a waiting caller gets no answer."""
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        for _ in range(STARTS):
            self.close()
            process = self._started()
            init_message = self._init_message
            if init_message is None or self._ask_once(process, init_message, START_SECONDS):
                return process
            if self._killed or self.fault is not Fault.KILLED:
                break
        raise EngineError(f"{' '.join(self._command)} ended before it was ready")

    def _started(self) -> "subprocess.Popen[str]":
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            command = [*self._command, str(self.seconds)]
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
        except OSError as error:
            raise EngineError(f"{' '.join(self._command)} cannot be started: {error}") from error
        self._process = process
        return process

    def _ask_once(self, process: "subprocess.Popen[str]", line: str, patience: float) -> str:
        """Return the process's answer to a line; "" if it was killed or died."""
        silent, answered = threading.Event(), threading.Event()

        def watch() -> None:
            worked, since, stopped = _processor_time(process.pid), monotonic(), 0
            while not answered.wait(min(LOOK, patience)):
                before, worked = worked, _processor_time(process.pid)
                since = since if worked == before else monotonic()
                stopped = stopped + 1 if _state(process.pid)[:1] == ["T"] else 0
                if stopped > 1 or monotonic() - since >= patience:
                    silent.set()
                    process.kill()
                    return

        threading.Thread(target=watch, name="forerun-sandbox", daemon=True).start()
        try:
            answer = self._written_and_read(process, line)
        except (OSError, ValueError):  # It died before it could listen, or was closed meanwhile.
            answer = ""
        finally:
            answered.set()
        if answer.endswith("\n"):
            return answer
        process.kill()
        code = process.wait()
        self.fault = Fault.SILENT if silent.is_set() else _BY_SIGNAL.get(-code, Fault.DIED)
        self.close()
        return ""

    def _written_and_read(self, process: "subprocess.Popen[str]", line: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        while True:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if self._questions is None or not answer.startswith('{"question":'):
                return answer
            line = json.dumps(self._questions(json.loads(answer)["question"]))


_BY_SIGNAL: dict[int, Fault] = {
    signal.SIGPROF: Fault.TIME,
    signal.SIGXCPU: Fault.TOTAL,
    signal.SIGKILL: Fault.KILLED,
    signal.SIGTERM: Fault.KILLED,
}
"""Signal that ended a process -> the fault. A process that lacks memory aborts."""


def _processor_time(pid: int) -> int:
    """Return a process's processor time in clock ticks; 0 if unknown."""
    return sum(map(int, _state(pid)[11:13]))


def _state(pid: int) -> list[str]:
    """Return the fields that Linux reports of a process after its name, its state first; [] on
    other systems.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer requests until standard input ends: runs in the process, whose first argument is its
    limit in seconds. An answer that takes more processor time than that ends the process with
    SIGPROF.
    """
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        message = json.dumps(answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(message + "\n")
        sys.stdout.flush()


def question(value: Any) -> Any:
    """Ask the parent a question, from within the process while it answers; return the answer to
    `value`, JSON values. Blocks.
    """
    sys.stdout.write(json.dumps({"question": value}) + "\n")
    sys.stdout.flush()
    return json.loads(sys.stdin.readline())
