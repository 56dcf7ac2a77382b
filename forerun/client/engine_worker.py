"""An engine in a process of its own: the engine's side.

Its threads: the engine's own; a receiver, which handles every message without blocking; a sender
of what a slow reader leaves in the way, so that the engine never waits for it; and those that
compile grammars.
"""

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic

from forerun.build.engine import Loaded
from forerun.build.executor_entry import Progress
from forerun.client import messages
from forerun.constrain.isolation.compile import MAX_WAITING
from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.engine.request import Delta
from forerun.engine.thread import Engine
from forerun.errors import EngineError, ForerunError, RankError, unusable

BEAT_SECONDS = 0.5
"""Seconds between two heartbeats."""

FAILED, NOT_LOADED, SERVER_GONE = 1, 3, 7
"""Exit codes: FAILED, a thread failed; NOT_LOADED, the model cannot be loaded (the server reports
why); SERVER_GONE, the server's process ended.
"""

NEEDED = ("forerun-engine", "forerun-send", "forerun-rank")
"""Prefixes of the names of threads without which clients would wait for ever."""

Load = Callable[[messages.Start, Progress], tuple[Loaded, dict[str, str]]]
"""Loads the model of the first message and reports the progress. Returns the model, and facts about
it as sentences for users.
"""

log = logging.getLogger("forerun.engine")


def run(fd: int, load: Load) -> int:
    """Run the engine for the server at the other end of file descriptor `fd`; blocks until the
    server closes the connection. Returns the exit code: 0, or NOT_LOADED if `load` raised.

    load  loads the model of the first message

    Ignores signals that end a server: the server handles them and ends this process. If the
    server's process ends, this one exits at once (SERVER_GONE). It also exits (FAILED) if a thread
    that clients depend on fails, for example for lack of memory.
    """
    threading.excepthook = _failed
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        start = messages.to_engine(connection.recv_bytes())
    except (EOFError, OSError):
        return SERVER_GONE
    assert isinstance(start, messages.Start)
    outbox = Outbox(connection.fileno())
    worker = _Worker(connection, outbox)
    threading.Thread(target=worker.receive, name="forerun-receive", daemon=True).start()
    try:
        loaded, facts = load(start, _progress(connection))
    except (ForerunError, ImportError) as error:
        connection.send_bytes(messages.encode(messages.NotLoaded(messages.Problem.of(error))))
        return NOT_LOADED
    except Exception as error:
        problem: ForerunError | None = unusable(error)
        if problem is None:
            log.exception("the model could not be loaded")
            problem = EngineError(f"The model could not be loaded: {error or type(error).__name__}")
        connection.send_bytes(messages.encode(messages.NotLoaded(messages.Problem.of(problem))))
        return NOT_LOADED
    worker.serve(loaded, facts)
    return 0


def _failed(what: threading.ExceptHookArgs) -> None:
    """Exit this process because a thread ended with an exception."""
    try:
        threading.__excepthook__(what)
    finally:
        if what.thread is not None and what.thread.name.startswith(NEEDED):
            os._exit(FAILED)


def _progress(connection: Connection) -> Progress:
    """Return a function that reports the progress of loading to the server, whenever its sentence
    changes.
    """
    last = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        message = messages.Loading(what, done, total)
        if message.sentence() != last:
            last = message.sentence()
            with suppress(OSError):  # The server is gone: the receiving thread ends the process.
                connection.send_bytes(messages.encode(message))

    return tell


def _problem(error: Exception, what: str) -> messages.Problem:
    """Return an error as a message; an unexpected one becomes an EngineError and is logged, with
    `what` failed.
    """
    if isinstance(error, ForerunError):
        return messages.Problem.of(error)
    log.error(what, exc_info=error)
    return messages.Problem.of(EngineError(f"{type(error).__name__}: {error}"))


class Outbox:
    """Messages to the server. The thread that puts one sends what its socket has room for, and so
    wakes no other thread; `flush` sends the rest.

    fd  the socket's file descriptor
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._changed = threading.Condition()
        self._unsent: deque[bytes] = deque()
        self._closed = False

    def put(self, message: messages.FromEngine) -> None:
        """Send a message, or queue it behind those that the server has not read; never blocks. Does
        nothing if the server is gone: the receiving thread ends the process.
        """
        data = messages.frame(message)
        with self._changed:
            if not self._unsent:
                data = data[self._send(data) :]
            if data:
                self._unsent.append(data)
                self._changed.notify()

    def flush(self, seconds: float) -> bool:
        """Send queued messages for `seconds`, and longer while the server does not read. Returns
        False once all are sent after `close`. Raises OSError if the server is gone.
        """
        until = monotonic() + seconds
        while True:
            with self._changed:
                ready = lambda: self._unsent or self._closed  # noqa: E731
                if not self._changed.wait_for(ready, until - monotonic()):
                    return True
                if not self._unsent:
                    return False
                data = self._unsent[0]  # Stays there: what is put meanwhile comes behind it.
            self._socket.sendall(data)
            with self._changed:
                self._unsent.popleft()

    def close(self) -> None:
        """Have `flush` return False once all messages are sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _send(self, data: bytes) -> int:
        """Return the number of bytes for which there was room."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


class _Worker:
    """The engine and its connection."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self._connection = connection
        self._outbox = outbox
        self._news: list[Delta] = []
        self._grammars: dict[int, CompiledGrammar | None] = {}
        self._compiling = ThreadPoolExecutor(MAX_WAITING + 1, "forerun-compile")
        self._ending = threading.Event()
        self._loaded: Loaded | None = None

    def serve(self, loaded: Loaded, facts: dict[str, str]) -> None:
        """Report what is loaded, and serve it until the server shuts it down."""
        self._loaded = loaded
        loaded.engine.on_step_done(self._step_done)
        loaded.engine.on_rank_lost(self._lost)
        if loaded.chat is not None:
            loaded.chat.close()  # The server renders.
        self._report([])  # The engine's state, before the first request.
        self._outbox.put(
            messages.Ready(
                loaded.name,
                loaded.context,
                loaded.config,
                loaded.info,
                dict(loaded.sampling),
                facts,
            )
        )
        sending = threading.Thread(target=self._send, name="forerun-send", daemon=True)
        sending.start()
        self._ending.wait()
        loaded.engine.shutdown()
        self._outbox.close()
        sending.join()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        loaded.close()

    # --- the receiving thread --------------------------------------------------------------

    def receive(self) -> None:
        """Handle the server's messages until the connection closes."""
        try:
            while True:
                self._do(messages.to_engine(self._connection.recv_bytes()))
        except (EOFError, OSError):
            log.warning("the server's process has ended: so does the engine's")
        except Exception:
            log.exception("the engine's process failed")
        os._exit(SERVER_GONE)

    def _do(self, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Shutdown):
            if self._loaded is None:
                os._exit(0)
            self._ending.set()
            return
        assert self._loaded is not None, "the server sent a message before the model was loaded"
        engine = self._loaded.engine
        match message:
            case messages.Submit():
                self._submit(message, self._loaded)
            case messages.Abort(request):
                engine.abort(request)
            case messages.Compile():
                self._grammars[message.call] = None
                self._compiling.submit(self._compile, message, self._loaded)
            case messages.Forget(number):
                self._grammars.pop(number, None)
            case messages.ForgetPrefixes():
                engine.forget_prefixes()
            case messages.Describe(call):
                self._describe(call, engine)

    def _describe(self, call: int, engine: Engine) -> None:
        try:
            answer = messages.Description(call, engine.stats(), engine.describe())
        except Exception as error:  # noqa: BLE001 - it crosses to the server.
            problem = _problem(error, "the engine could not be described")
            self._outbox.put(messages.Failed(call, problem))
        else:
            self._outbox.put(answer)

    def _submit(self, message: messages.Submit, loaded: Loaded) -> None:
        request = message.request
        try:
            if request.grammar is not None:
                request = replace(request, grammar=self._grammars[request.grammar])
            loaded.engine.submit(request, self._news.append)
        except Exception as error:  # noqa: BLE001 - it crosses to the server.
            problem = _problem(error, f"request {request.id} could not be taken in")
            self._outbox.put(messages.Refused(request.id, problem))

    # --- other threads ---------------------------------------------------------------------

    def _compile(self, message: messages.Compile, loaded: Loaded) -> None:
        try:
            compiled = loaded.target.compile(message.grammar, message.client)
        except Exception as error:  # noqa: BLE001 - it crosses to the server.
            problem = _problem(error, "a grammar could not be compiled")
            self._grammars.pop(message.call, None)
            self._outbox.put(messages.Failed(message.call, problem))
            return
        if message.call in self._grammars:  # Else it was forgotten.
            self._grammars[message.call] = compiled
        self._outbox.put(messages.Compiled(message.call, compiled.unenforced))

    def _lost(self, why: str) -> None:
        self._outbox.put(messages.Lost(messages.Problem.of(RankError(why))))

    def _step_done(self) -> None:
        """Send the deltas of a step as one message. Runs on the engine's thread."""
        if self._news:
            self._report(self._news)
            self._news.clear()

    def _report(self, deltas: list[Delta]) -> None:
        """Send deltas, possibly none, and the engine's state."""
        assert self._loaded is not None
        engine = self._loaded.engine
        condition = messages.Condition(engine.alive, engine.fault, engine.step_began)
        self._outbox.put(messages.Deltas(deltas, condition))

    def _send(self) -> None:
        """Send what the server did not read at once, and heartbeats, until the end."""
        with suppress(OSError):  # The server is gone: the receiving thread ends the process.
            while self._outbox.flush(BEAT_SECONDS):
                self._report([])
