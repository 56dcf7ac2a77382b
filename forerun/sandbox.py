"""A process of our own for work whose cost a stranger decides: it can be killed.

It reads one line of JSON per request from standard input and answers each with one line of JSON.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from forerun.errors import EngineError

START_SECONDS = 120.0
"""Some libraries take their time to load."""


class SandboxProcess:
    """Started when needed, killed when an answer takes too long, then started anew. Not locked.

    command  what starts it
    seconds  that an answer may take
    init_message  the first line it reads, which it answers with one of its own when it is ready;
             None = it needs neither
    """

    def __init__(
        self, command: Sequence[str], seconds: float, init_message: str | None = None
    ) -> None:
        self._command, self._seconds, self._init_message = command, seconds, init_message
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, str] | None:
        """The process's answer; None where it took too long or died, for want of memory perhaps.

        Raises EngineError where no process can be started.
        """
        line = self._ask_once(self._running(), json.dumps(request), self._seconds)
        if not line:
            return None
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self._process = None

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=null, text=True
            )
        except OSError as error:
            raise EngineError(f"{' '.join(self._command)} cannot be started: {error}") from error
        self._process = process
        init_message = self._init_message
        if init_message is not None and not self._ask_once(process, init_message, START_SECONDS):
            raise EngineError(f"{' '.join(self._command)} ended before it was ready")
        return process

    def _ask_once(self, process: "subprocess.Popen[str]", line: str, seconds: float) -> str:
        """The process's answer to a line; empty where it had to be killed or died by itself."""
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # It died before it could listen.
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            self.close()
            return ""
        return answer


def serve(answer: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """In the process: answer until standard input ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
