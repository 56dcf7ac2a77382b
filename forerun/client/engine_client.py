"""The interface of an engine for an event loop, the same for an engine in this process and in
another.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from forerun.build.engine import Loaded
from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import MAX_WAITING
from forerun.engine.request import Delta, Request
from forerun.engine.stats import Stats
from forerun.errors import EngineError, ForerunError, RankError
from forerun.types import RequestId


class Sink(Protocol):
    """Receives the deltas of a request, on the event loop."""

    def put(self, deltas: list[Delta]) -> None:
        """Receive the next deltas, in order. The last of each choice has `finish` set."""
        ...

    def fail(self, error: ForerunError) -> None:
        """Receive the error with which the engine refused the request or ended: no delta
        follows.
        """
        ...


class Constraint(Protocol):
    """A compiled grammar, as Request.grammar holds it.

    unenforced  keywords of schemas that are not enforced, as paths from the request's body
    """

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of schemas that are not enforced, as paths from the request's body; () = all
        are.
        """
        ...


class EngineClient(Protocol):
    """The methods of an engine that a server needs. Called on the event loop; none blocks."""

    lost: asyncio.Event
    """Set when a process that every step needs has ended: the engine's own, or one that shares the
    model.
    """

    loss: EngineError | None
    """The error that ended the engine; None = it runs."""

    @property
    def alive(self) -> bool:
        """False once the engine has failed for good, was closed, or its process ended."""
        ...

    @property
    def fault(self) -> str | None:
        """Why speculation is off although it is configured, as a sentence for users; None = no
        fault.
        """
        ...

    @property
    def step_began(self) -> float | None:
        """When the current step began, in seconds of time.monotonic; None between steps. If the
        engine's process sends no heartbeat, the time of its last one.
        """
        ...

    @property
    def pid(self) -> int:
        """Id of the engine's process, which may be this one."""
        ...

    @property
    def last_stats(self) -> Stats:
        """The counters that `stats` returned last; does not query the engine."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its deltas are passed to the sink on the event loop. If the engine
        refuses it, either this raises RequestError or EngineError, or `sink.fail` receives the
        error.
        """
        ...

    def abort(self, request: RequestId) -> None:
        """End a request early; its last delta follows. An unknown request is ignored."""
        ...

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """Compile a grammar for a request of `client`, off the event loop; the result is a value
        for Request.grammar. Raises RequestError naming the field and the place at fault, BusyError
        if too many compilations are waiting, EngineError if the engine has ended.
        """
        ...

    async def stats(self) -> Stats:
        """Return a snapshot of the engine's counters; the last one if the engine does not
        answer.
        """
        ...

    async def describe(self) -> dict[str, Any]:
        """Return facts about drafter and policy for /server_info; the last ones if the engine does
        not answer. Raises EngineError if it has ended.
        """
        ...

    def forget_prefixes(self) -> None:
        """Evict, before the engine's next step, all cached pages that no running sequence holds."""
        ...

    async def close(self) -> None:
        """End running requests and release the model; returns when done. Idempotent."""
        ...


class Sinks:
    """The sinks of all running requests."""

    def __init__(self) -> None:
        self._open: dict[RequestId, tuple[Sink, int]] = {}

    def add(self, request: Request, sink: Sink) -> None:
        """Store the sink of a request that is being submitted, for its n choices."""
        self._open[request.id] = (sink, request.n)

    def drop(self, request: RequestId, error: ForerunError | None = None) -> None:
        """Remove a request that was refused; its sink fails with `error`, if one is given. An
        unknown request is ignored.
        """
        sink, _ = self._open.pop(request, (None, 0))
        if sink is not None and error is not None:
            sink.fail(error)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Pass deltas to their requests' sinks, in order, all of a sink at once; a request is
        removed at the end of its last choice. Deltas of unknown requests are dropped.
        """
        news: dict[Sink, list[Delta]] = {}
        for delta in deltas:
            sink, left = self._open.get(delta.request, (None, 0))
            if sink is not None:
                news.setdefault(sink, []).append(delta)
            if delta.finish is not None and left <= 1:
                self._open.pop(delta.request, None)
            elif sink is not None and delta.finish is not None:
                self._open[delta.request] = (sink, left - 1)
        for sink, own in news.items():
            sink.put(own)

    def fail(self, error: ForerunError) -> None:
        """Fail the sink of every open request with `error`, and remove the requests."""
        for request in tuple(self._open):
            self.drop(request, error)


class LocalEngine:
    """An engine in this process, as an EngineClient. Must be created on the event loop."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._engine = loaded, loaded.engine
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._sinks = Sinks()
        self._news: list[Delta] = []
        # One thread more than may wait, so that the compiler itself refuses what is too many.
        self._compiling = ThreadPoolExecutor(MAX_WAITING + 1, "forerun-compile")
        self.last_stats = self._engine.stats()
        self.lost = asyncio.Event()
        self.loss: EngineError | None = None
        self._engine.on_step_done(self._step_done)
        self._engine.on_rank_lost(self._lost)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._engine.alive

    @property
    def fault(self) -> str | None:
        """Why speculation is off although it is configured; None = no fault."""
        return self._engine.fault

    @property
    def step_began(self) -> float | None:
        """When the current step began, in seconds of time.monotonic; None between steps."""
        return self._engine.step_began

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Raises RequestError or EngineError if it is refused; `sink` is then not
        called.
        """
        self._sinks.add(request, sink)
        try:
            self._engine.submit(request, self._news.append)
        except Exception:
            self._sinks.drop(request.id)
            raise

    def abort(self, request: RequestId) -> None:
        """End a request; its last delta follows."""
        self._engine.abort(request)

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """Compile a grammar on a thread of a pool. Errors as of EngineClient.compile."""
        work = partial(self._loaded.target.compile, grammar, client)
        return await self._loop.run_in_executor(self._compiling, work)

    async def stats(self) -> Stats:
        """Return a snapshot of the engine's counters."""
        self.last_stats = self._engine.stats()
        return self.last_stats

    async def describe(self) -> dict[str, Any]:
        """Return facts for /server_info, from Engine.describe."""
        return self._engine.describe()

    def forget_prefixes(self) -> None:
        """Evict, before the engine's next step, all cached pages that no running sequence holds."""
        self._engine.forget_prefixes()

    async def close(self) -> None:
        """End the engine and release the model, on a thread; waiting compilations are cancelled."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._loaded.close)

    def _lost(self, why: str) -> None:
        """Report the end of the engine to the event loop. Runs on the engine's thread or a
        rank's.
        """
        call_soon(self._loop, partial(self._lose, RankError(why)))

    def _lose(self, loss: EngineError) -> None:
        self.loss = loss
        self._sinks.fail(loss)  # Requests whose end the engine could not report.
        self.lost.set()

    def _step_done(self) -> None:
        """Pass all deltas of a step to the event loop. Runs on the engine's thread."""
        if self._news:
            deltas = self._news.copy()
            self._news.clear()
            call_soon(self._loop, partial(self._sinks.deliver, deltas))


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    """Schedule `call` on the event loop, from any thread. Returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True
