"""The server process: its socket, its signals, its shutdown."""

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from forerun.errors import ConfigError
from forerun.options.config import ServeSettings
from forerun.serve.answers.service import Start
from forerun.serve.app import create_app, create_models_app
from forerun.serve.http.connection import close_idle, connections
from forerun.serve.http.tasks import start_task
from forerun.serve.models import Source

if sys.platform != "win32":
    import resource

FLUSH_SECONDS = 5
"""Seconds for the ends of aborted answers to reach their clients."""
BACKLOG = 2048
"""Most connections that may wait to be accepted."""
AT_ONCE = 16
"""Connections that are accepted at once. Asyncio reports up to as many failures of one attempt,
too.
"""
SILENT_SECONDS = 60.0
"""Seconds before the warning that no file can be opened is repeated."""
ROOM_SECONDS = 0.5
"""Seconds that a new connection is not closed to make room: asyncio retries after a second."""
MOST_FILES = 65536
"""The most open files that a server requests from the system."""
IDLE_SECONDS = 75
"""Seconds that a connection may stay open between requests: longer than client pools reuse
theirs.
"""

log = logging.getLogger("forerun.serve")


def run(
    source: Start | Sequence[Source],
    settings: ServeSettings,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal; returns after cleaning up.

    source    a model, its loader, or several that are loaded on first use
    announce  called with the URL once the server listens

    The first SIGTERM, SIGINT or SIGHUP drains: new requests get 503, running ones have
    `settings.drain_seconds`. A second ends the process at once with status 128 + signal.
    Raises ConfigError if it cannot listen, what `source` raises, and EngineLostError if the
    engine's process has ended.
    """
    listening = listen(settings.host, settings.port)
    allow_connections()
    if isinstance(source, Sequence):
        app = create_models_app(source, settings)
    else:
        app = create_app(source, settings)
    server = Server(uvicorn_config(app, settings), app.state.service)
    announce(url(listening, settings))
    with listening:
        server.run(sockets=[listening])
    if app.state.service.failure is not None:
        raise app.state.service.failure


def url(listening: socket.socket, settings: ServeSettings) -> str:
    """Return the base URL of the API at this socket, ending in /v1."""
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{_bracketed(host)}:{port}/v1"


def uvicorn_config(app: ASGIApp, settings: ServeSettings) -> uvicorn.Config:
    """Return uvicorn's configuration, the same for tests and for service. Raises ConfigError if key
    or certificate cannot be used.
    """
    if settings.ssl_certfile is not None:
        _check_certificate(settings)
    return uvicorn.Config(
        app,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        loop="asyncio",
        http=connections(settings.send_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        backlog=AT_ONCE,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


def _check_certificate(settings: ServeSettings) -> None:
    assert settings.ssl_certfile is not None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl-certfile {settings.ssl_certfile} and ssl-keyfile {settings.ssl_keyfile} cannot "
            f"be used: {error.strerror or error}."
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Bind and return a listening socket. Raises ConfigError with the reason. The protocol is set
    explicitly, because asyncio sets TCP_NODELAY on the connections of such sockets only: without
    it, the end of an answer waits some 40 ms for the client's acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        # Now, not when the loop runs: early clients wait, and a second server is refused here.
        bound.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        bound.close()
        raise ConfigError(_in_the_way(host, port, error)) from error
    return bound


def allow_connections() -> None:
    """Raise the limit of open files, one per connection, as far as allowed: many shells set 1,024,
    and a server at its limit accepts no connection.
    """
    if sys.platform == "win32":  # Counts otherwise.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _bracketed(host: str) -> str:
    """Return an address as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def _in_the_way(host: str, port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken by another program; choose another with --port, "
            "or let --port 0 find a free one."
        )
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023."
    return f"cannot listen on {host}, port {port}: {error}."


class Drained(Protocol):
    """A part that a server drains at its end: Service, Models, or the front of replicas.

    failed  set when it cannot answer any more
    """

    settings: ServeSettings
    failed: asyncio.Event

    async def drain(self, seconds: float) -> bool:
        """Reject new requests and wait, at most `seconds`, for running ones. Returns whether all
        have ended.
        """
        ...

    async def close(self) -> None:
        """Stop the engine, which ends the running requests, and release the model."""
        ...


class Server(uvicorn.Server):
    """Uvicorn's server, with the shutdown that `run` describes."""

    def __init__(self, config: uvicorn.Config, service: Drained) -> None:
        super().__init__(config)
        self.service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._signalled = False
        self._full_since = self._room_made = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on `sockets`, each with a queue of BACKLOG connections."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; ends also if the model cannot be loaded, or a process that shares it has ended."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._failed)
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # A terminal that closes.
            self._loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)
        self._tasks.append(start_task(self._end_on_failure(), "the watch over the model"))
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain on a signal; the second one ends the process at once with status 128 +
        signal. Called between two bytecodes of the main thread.
        """
        if self._signalled or self._loop is None:
            os._exit(128 + sig)
        self._signalled = True
        self._loop.call_soon_threadsafe(self._begin_to_end)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that no task raises. If no connection can be accepted, asyncio retries after
        a second; meanwhile idle connections are closed to make room.
        """
        error, now = context.get("exception"), loop.time()
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
            return
        if now - self._room_made > ROOM_SECONDS:
            self._room_made = now
            # What has come with its request by then is not idle.
            loop.call_later(ROOM_SECONDS, close_idle, self.server_state.connections, AT_ONCE)
        if now - self._full_since > SILENT_SECONDS:
            self._full_since = now
            log.error(
                "no new connection can be accepted: %s. Idle connections are closed, those with "
                "requests continue; raise the limit of open files (ulimit -n) for more.",
                error.strerror,
            )

    def _begin_to_end(self) -> None:
        self._tasks.append(start_task(self._end(), "the end of the server"))

    async def _end(self) -> None:
        if not await self.service.drain(self.service.settings.drain_seconds):
            log.warning("time is up: ending the requests that still run")
        await self.service.close()
        self.should_exit = True

    async def _end_on_failure(self) -> None:
        await self.service.failed.wait()
        # Requests that a lost engine ended with an error have still to send it.
        await self.service.drain(FLUSH_SECONDS)
        await self.service.close()
        self.should_exit = True
