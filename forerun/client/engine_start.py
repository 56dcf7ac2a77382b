"""Starts the process of an engine. A server does this before it imports its own code, which takes
as long as the engine's, so this module imports nothing heavy.
"""

import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from forerun.errors import EngineError


class EngineProgram(NamedTuple):
    """The program of an engine's process.

    command  starts it; the file descriptor of its end of the connection is appended as an argument
    options  sent with its configuration (messages.Start), as JSON values
    """

    command: Sequence[str]
    options: dict[str, Any]


class EngineStart:
    """A process of an engine, running from construction on, and the server's end of the connection.

    command  starts it; the file descriptor of its end of the connection is appended as an argument
    began    when the model was requested, in seconds on the monotonic clock; None = now

    The process has a session of its own, so that a terminal's interrupt reaches only the server,
    which then ends the engine. Raises EngineError if the system cannot start the process.
    """

    def __init__(self, command: Sequence[str], began: float | None = None) -> None:
        self.began = monotonic() if began is None else began
        self.connection, theirs = socket.socketpair()
        self.taken = False
        fd, null = theirs.fileno(), subprocess.DEVNULL
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(fd)],
                    stdin=null,
                    stdout=null,
                    pass_fds=(fd,),
                    start_new_session=True,
                )
        except OSError as error:
            self.connection.close()
            raise EngineError(f"the engine's process cannot be started: {error}") from error

    def send(self, data: bytes) -> None:
        """Send an encoded message; blocks until it fits into the socket's buffer. If the process
        has ended, does nothing: the caller of `take` finds out.
        """
        with suppress(OSError):
            self.connection.sendall(len(data).to_bytes(4) + data)

    def take(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        """Return the process and the connection; from then on the caller has to end them."""
        self.taken = True
        return self.process, self.connection

    def discard(self) -> None:
        """Kill the process and wait for its end, unless `take` was called. Idempotent."""
        if not self.taken:
            self.taken = True
            # Killed first: one that heard the end of the connection would warn of a server that
            # ended, beside the reason for which it did.
            self.process.kill()
            self.process.wait()
            self.connection.close()
