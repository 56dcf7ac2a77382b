"""Starts a Forerun server to measure, and stops it again."""

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from forerun.errors import EngineError
from forerun.options.config import EngineConfig
from forerun.options.flags import command_line

ELSEWHERE = ("FORERUN_", "LLAMA_ARG_", "LLAMA_API_KEY", "VLLM_API_KEY")
"""Prefixes of the environment variables that hold options, which are removed: a launched server
takes options only from its command line.
"""
START_SECONDS = 600.0
"""Seconds for the server to start; a model may have to be downloaded first."""


@contextmanager
def launched(config: EngineConfig) -> Iterator[str]:
    """Run a `forerun serve` process with this configuration on a free port of 127.0.0.1, as a
    context manager. Yields its address, which ends in /v1, once /health answers 200; ends the
    process on exit. Raises EngineError, with the end of the server's log, if that takes longer than
    START_SECONDS or the process ends.
    """
    port = _free_port()
    line = [sys.executable, "-m", "forerun.cli", "serve", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*line, *command_line(config)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={name: text for name, text in os.environ.items() if not name.startswith(ELSEWHERE)},
        )
        try:
            if not _came_up(port, process):
                log.seek(0)
                raise EngineError(f"The server did not start: {log.read()[-2000:].strip()}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(port: int) -> bool:
    """Return whether a server on this port of 127.0.0.1 answers GET /health with 200 within 5
    seconds.

    Uses a bare connection because it runs while the server measures the costs of its steps:
    `httpx.get` creates a client each time, which takes tens of milliseconds of a core.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def _came_up(port: int, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if healthy(port):
            return True
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
