"""An engine in a process of its own: the server's side. The engine's process ends when this one
does, for whatever reason, because the connection between them then breaks.
"""

import asyncio
import itertools
import logging
import signal
import subprocess
import threading
import weakref
from asyncio import Future, Transport
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from forerun import child
from forerun.client import messages
from forerun.client.engine_client import Constraint, Sink, Sinks, call_soon
from forerun.client.engine_start import EngineProgram, EngineStart
from forerun.client.engine_worker import BEAT_SECONDS
from forerun.constrain.grammar import Grammar
from forerun.engine.request import Delta, Request
from forerun.engine.stats import Stats
from forerun.errors import EngineError, EngineLostError, ForerunError, RankError, RequestError
from forerun.options.config import EngineConfig
from forerun.types import RequestId

CLOSE_SECONDS = 10.0
"""Seconds for an engine to end its step and release its memory; after them its process is
killed.
"""

SILENT_SECONDS = 10 * BEAT_SECONDS
"""Seconds without a heartbeat after which a process counts as stuck since its last one."""

CAUSES = {
    "SIGKILL": ", perhaps for lack of memory",
    "SIGBUS": ", as where a file is cut or its disk fails while it is read",
}
"""What may have sent a signal that ends the process."""
ASK_SECONDS = 5.0
"""Seconds to wait for counters and facts; after them the last ones are used. The answer is queued
after deltas that the server may not have read yet.
"""

log = logging.getLogger("forerun.serve")


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command and configuration of an engine's process.

    arrived  called once the model can answer, with facts about it, as sentences for users, and the
             seconds that loading took
    begun    a process that already runs and has received its Start, used by the first `open`
    """

    program: EngineProgram
    config: EngineConfig
    arrived: Callable[[dict[str, str], float], None] = lambda *_: None
    begun: EngineStart | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RemoteGrammar:
    """A grammar that the engine's process keeps, under a number, for as long as this object exists.
    See Constraint.
    """

    number: int
    unenforced: tuple[str, ...]


class EngineProcess:
    """An engine in another process, as an EngineClient. Create it with `open`, on the event
    loop.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        loading: Callable[[str], None],
        shares: bool,
    ) -> None:
        self.pid = process.pid
        self.lost = asyncio.Event()
        self.loss: EngineError | None = None
        self._process = process
        self._sinks = Sinks()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._condition = messages.Condition()
        self._heard = monotonic()
        self._closing, self._loading = False, loading
        self._loop = asyncio.get_running_loop()
        self._connection = _Connection(self._hear)
        self._ready: asyncio.Future[messages.Ready] = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        waiting = (self._wait, "forerun-engine-ends", (shares,))
        threading.Thread(None, *waiting, daemon=True).start()
        self._watching = self._loop.create_task(self._watch())
        self.last_stats: Stats
        self._about: dict[str, Any] = {}

    @classmethod
    async def open(
        cls, start: EngineCommand, loading: Callable[[str], None] = lambda _: None
    ) -> tuple["EngineProcess", messages.Ready]:
        """Start the process, unless it was started before, and wait until it has loaded the model.
        Returns the client and the facts about the model. `loading` is called with the progress, as
        sentences for users. Raises the error of loading, or EngineLostError if the process ended
        first; no process is left then.
        """
        begun = start.begun
        if begun is None or begun.taken:
            begun = EngineStart(start.program.command)
            begun.send(messages.encode(messages.Start(start.config, start.program.options)))
        process, connection = begun.take()
        # Others that share the model wait for it within a step, and their clients with them.
        client = cls(process, loading, shares=start.config.tp_size > 1)
        await client._loop.create_connection(lambda: client._connection, sock=connection)
        try:
            ready = await asyncio.shield(client._ready)
            await client._description()
        except BaseException:
            client._ready.cancel()  # No caller waits any more, so none would retrieve its error.
            await client.close()
            raise
        return client, ready

    @property
    def alive(self) -> bool:
        """Whether the process runs, is not being closed, and last reported its engine as alive."""
        return self._condition.alive and not self._closing and self.loss is None

    @property
    def fault(self) -> str | None:
        """Why speculation is off although it is configured, as last reported; None = no fault."""
        return self._condition.fault

    @property
    def step_began(self) -> float | None:
        """When the current step began, as last reported; after SILENT_SECONDS without a heartbeat,
        the time of the last one. Seconds of time.monotonic.
        """
        silent = monotonic() - self._heard > SILENT_SECONDS
        return self._heard if silent else self._condition.step_began

    def submit(self, request: Request, sink: Sink) -> None:
        """Send a request. Raises EngineError if the process has ended; if the engine refuses the
        request, `sink.fail` receives the error.
        """
        if self.loss is not None or self._closing:
            raise self.loss or EngineError("The engine was shut down; it takes no more requests.")
        grammar = request.grammar
        number = grammar.number if isinstance(grammar, RemoteGrammar) else grammar
        self._send(messages.Submit(replace(request, grammar=number)))
        self._sinks.add(request, sink)

    def abort(self, request: RequestId) -> None:
        """Send the order to end a request; its last delta follows."""
        self._send(messages.Abort(request))

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """Compile a grammar in the engine's process, which keeps it as long as the result exists;
        cancelling the call discards it. Errors as of EngineClient.compile.
        """
        number = next(self._numbers)
        try:
            compiled = await self._call(number, messages.Compile(number, grammar, client))
        except UnicodeEncodeError as error:
            message = f"{grammar.field} has a lone surrogate; send valid Unicode"
            raise RequestError(message, grammar.field) from error
        except asyncio.CancelledError:
            self._send(messages.Forget(number))
            raise
        constraint = RemoteGrammar(number, compiled.unenforced)
        # A collection of garbage may run on any thread.
        forget = partial(call_soon, self._loop, partial(self._send, messages.Forget(number)))
        weakref.finalize(constraint, forget).atexit = False
        return constraint

    async def stats(self) -> Stats:
        """Return the counters; the last ones if the process has ended or does not answer within
        ASK_SECONDS.
        """
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(ASK_SECONDS):
                await self._description()
        return self.last_stats

    async def describe(self) -> dict[str, Any]:
        """Return facts for /server_info; the last ones if there is no answer within ASK_SECONDS.
        Raises EngineError if the process has ended.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                await self._description()
        return self._about

    def forget_prefixes(self) -> None:
        """Send the order to evict cached pages that no running sequence holds."""
        self._send(messages.ForgetPrefixes())

    async def close(self) -> None:
        """End the process and wait for it; one that has not ended after CLOSE_SECONDS is killed.
        Idempotent.
        """
        self._closing = True
        self._send(messages.Shutdown())
        killing = self._loop.call_later(CLOSE_SECONDS, self._kill)
        await asyncio.shield(self._watching)
        killing.cancel()

    def _kill(self) -> None:
        if self._process.returncode is None:
            log.warning("the engine's process (%d) does not end: killing it", self.pid)
            child.kill(self._process)

    def _wait(self, shares: bool) -> None:
        """Wait for the process's end, on a thread. shares: whether other processes share its model,
        in which case it must not be stopped (SIGSTOP).
        """
        stopped = child.wait(self._process) if shares else 0
        self._process.wait()
        call_soon(self._loop, partial(self._ended.set_result, stopped))

    async def _description(self) -> None:
        """Request counters and facts and wait for them. Raises EngineLostError if the process ends
        first.
        """
        call = next(self._numbers)
        await self._call(call, messages.Describe(call))

    async def _call(self, call: int, message: messages.ToEngine) -> Any:
        """Send a call and return its result. Raises the engine's error, or EngineLostError."""
        if self.loss is not None:
            raise self.loss
        self._calls[call] = self._loop.create_future()
        try:
            self._send(message)
            return await self._calls[call]
        finally:
            del self._calls[call]

    def _send(self, message: messages.ToEngine) -> None:
        """Send a message. Raises UnicodeEncodeError for text that is not valid Unicode."""
        self._connection.send(messages.frame(message))

    async def _watch(self) -> None:
        """Wait until the process has ended, and kill one that closed its connection and does not
        end.
        """
        await self._connection.lost
        killing = self._loop.call_later(CLOSE_SECONDS, self._kill)
        stopped = await self._ended
        killing.cancel()
        self._lose(self._process.returncode, stopped)

    def _hear(self, heard: Sequence[messages.FromEngine]) -> None:
        """Handle messages of the process. Deltas that arrived together are delivered together."""
        self._heard = monotonic()
        news: list[Delta] = []
        for message in heard:
            if isinstance(message, messages.Deltas):
                self._condition = message.condition
                news += message.deltas
            else:
                self._sinks.deliver(news)
                news = []
                self._answer(message)
        self._sinks.deliver(news)

    def _answer(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Refused(request, problem):
                self._sinks.drop(request, _ours(problem.error()))
            case messages.Compiled(call):
                _settle(self._calls.get(call), lambda future: future.set_result(message))
            case messages.Description(call):  # Also one that no caller waits for any more.
                self.last_stats, self._about = message.stats, message.about
                _settle(self._calls.get(call), lambda future: future.set_result(message))
            case messages.Failed(call, problem):
                _settle(self._calls.get(call), lambda future: future.set_exception(problem.error()))
            case messages.Lost(problem):
                loss = RankError(str(problem.error()))
                self._sinks.fail(loss)  # Requests whose end the engine could not report.
                self._lost_by(loss)
            case messages.Loading():
                self._loading(message.sentence())
            case messages.Ready():
                _settle(self._ready, lambda ready: ready.set_result(message))
            case messages.NotLoaded(problem):
                _settle(self._ready, lambda ready: ready.set_exception(problem.error()))

    def _lose(self, code: int, stopped: int) -> None:
        """Fail everything that waits, because the process has ended. code: its exit code."""
        how = f"ended with {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}{CAUSES.get(name, '')}"
        if stopped:
            how = f"was stopped by {signal.Signals(stopped).name}, while others share its model"
        loss = EngineLostError(f"The engine's process {how}; see the server's log.")
        self._sinks.fail(loss)
        for future in (self._ready, *self._calls.values()):
            _settle(future, lambda future: future.set_exception(loss))
        self._lost_by(loss)

    def _lost_by(self, loss: EngineError) -> None:
        """Fail all requests, because no step can run any more. Only the first reason is kept."""
        if not self._closing and self.loss is None:
            self.loss = loss
            self.lost.set()


class _Connection(asyncio.Protocol):
    """The connection to the process. `hear` is called with all messages that have arrived.

    lost  done when the connection is closed
    """

    _transport: Transport

    def __init__(self, hear: Callable[[Sequence[messages.FromEngine]], None]) -> None:
        self.lost: Future[None] = asyncio.get_running_loop().create_future()
        self._hear = hear
        self._unread = bytearray()

    def send(self, data: bytes) -> None:
        """Send a frame, unless the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        unread, begin = self._unread, 0
        unread += data
        heard = []
        while len(unread) - begin >= 4:
            end = begin + 4 + int.from_bytes(unread[begin : begin + 4])
            if len(unread) < end:
                break
            heard.append(messages.from_engine(unread[begin + 4 : end]))
            begin = end
        del unread[:begin]
        self._hear(heard)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.lost.set_result(None)


def _settle(future: Future[Any] | None, settle: Callable[[Future[Any]], None]) -> None:
    """Complete a future with `settle`, unless it is None or already done."""
    if future is not None and not future.done():
        settle(future)


def _ours(error: ForerunError | ImportError) -> ForerunError:
    return error if isinstance(error, ForerunError) else EngineError(str(error))
