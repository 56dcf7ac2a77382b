"""Starting a Forerun server of our own to measure, and stopping it again."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from forerun.config import EngineConfig
from forerun.errors import EngineError
from forerun.flags import command_line

START_SECONDS = 600.0
"""A model may have to be downloaded first."""


@contextmanager
def launched(config: EngineConfig) -> Iterator[str]:
    """A server process with this configuration, on a free port; yields its /v1 address.

    Raises EngineError with the end of its log where it does not come up.
    """
    port = _free_port()
    line = [sys.executable, "-m", "forerun.cli", "serve", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*line, *command_line(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            if not _healthy(port, process):
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


def _healthy(port: int, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False)
            if answer.status_code == httpx.codes.OK:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
