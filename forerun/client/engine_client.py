"""An engine as an event loop uses it: one contract, whether it runs in this process or another."""

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
    """Gets the news of requests, on the event loop."""

    def put(self, delta: Delta) -> None:
        """Take the next delta of a choice, in order. The last of each choice has `finish` set."""
        ...

    def fail(self, error: ForerunError) -> None:
        """Receive that the engine refused the request, or has ended: no delta follows."""
        ...


class Constraint(Protocol):
    """A compiled grammar: what Request.grammar holds.

    unenforced  keywords of schemas that are not enforced, as paths from the request's body
    """

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of schemas that are not enforced, as paths from the request's body; () = all
        are.
        """
        ...


class EngineClient(Protocol):
    """All methods that a server needs of an engine. On the event loop; nothing here blocks."""

    lost: asyncio.Event
    """Set when a process without which no step can run is gone: its own, or one that shares the
    model."""

    loss: EngineError | None
    """Why the engine ended; None = it runs."""

    @property
    def alive(self) -> bool:
        """False once the engine gave up, was closed, or its process ended."""
        ...

    @property
    def fault(self) -> str | None:
        """Why nothing is drafted although it should be, in words for people; None = all is well."""
        ...

    @property
    def step_began(self) -> float | None:
        """When the step under way began, in seconds of time.monotonic; None between steps. Of a
        process that gives no sign of life, when it gave the last one.
        """
        ...

    @property
    def pid(self) -> int:
        """Id of the process that the engine runs in, which may be this one."""
        ...

    @property
    def last_stats(self) -> Stats:
        """The counters that `stats` returned last, without asking again."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; deltas go to the sink on the event loop. Where it cannot be honoured,
        either this raises RequestError or EngineError, or the sink fails with it.
        """
        ...

    def abort(self, request: RequestId) -> None:
        """End a request; its last delta follows. An unknown request is no error."""
        ...

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """Compile a grammar for a request of `client`, away from the event loop; the result goes
        into Request.grammar.

        Raises RequestError naming the field and the place at fault, BusyError if too many wait,
        EngineError if the engine is gone.
        """
        ...

    async def stats(self) -> Stats:
        """Return a snapshot of the engine's counters; the last one if the engine does not
        answer.
        """
        ...

    async def describe(self) -> dict[str, Any]:
        """Return facts for /server_info about drafter and policy; the last ones if the engine does
        not answer. Raises EngineError if it is gone.
        """
        ...

    def forget_prefixes(self) -> None:
        """Have the engine forget, before its next step, all cached pages that no running sequence
        holds.
        """
        ...

    async def close(self) -> None:
        """End what runs, and release the model; waits for it. Idempotent."""
        ...


class Sinks:
    """The sinks of all running requests."""

    def __init__(self) -> None:
        self._open: dict[RequestId, tuple[Sink, int]] = {}

    def add(self, request: Request, sink: Sink) -> None:
        """Remember the sink of a request that is being submitted, for its n choices."""
        self._open[request.id] = (sink, request.n)

    def drop(self, request: RequestId, error: ForerunError | None = None) -> None:
        """Forget a request that was refused; its sink fails with `error`, if one is given. Unknown:
        nothing.
        """
        sink, _ = self._open.pop(request, (None, 0))
        if sink is not None and error is not None:
            sink.fail(error)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Hand deltas to their requests' sinks, in order; a request is forgotten with the end of
        its last choice. Deltas of unknown requests are dropped.
        """
        for delta in deltas:
            sink, left = self._open.get(delta.request, (None, 0))
            if sink is None:
                continue
            if delta.finish is not None and left == 1:
                del self._open[delta.request]
            elif delta.finish is not None:
                self._open[delta.request] = (sink, left - 1)
            sink.put(delta)

    def fail(self, error: ForerunError) -> None:
        """Fail every open request's sink with `error`, and forget it."""
        for request in tuple(self._open):
            self.drop(request, error)


class LocalEngine:
    """An engine in this process, as an EngineClient. Made on the event loop."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._engine = loaded, loaded.engine
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._sinks = Sinks()
        self._news: list[Delta] = []
        # One more than may wait: the compiler itself says when there are too many.
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
        """Why nothing is drafted although it should be; None = all is well."""
        return self._engine.fault

    @property
    def step_began(self) -> float | None:
        """When the step under way began (time.monotonic); None between steps."""
        return self._engine.step_began

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Raises RequestError or EngineError at once where it cannot be honoured;
        then the sink gets nothing.
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
        """Compile a grammar on a thread of its own. Errors as of EngineClient.compile."""
        work = partial(self._loaded.target.compile, grammar, client)
        return await self._loop.run_in_executor(self._compiling, work)

    async def stats(self) -> Stats:
        """Return a snapshot of the engine's counters, taken at once."""
        self.last_stats = self._engine.stats()
        return self.last_stats

    async def describe(self) -> dict[str, Any]:
        """Return facts for /server_info, from Engine.describe."""
        return self._engine.describe()

    def forget_prefixes(self) -> None:
        """Have the engine drop cached pages that no sequence holds, before its next step."""
        self._engine.forget_prefixes()

    async def close(self) -> None:
        """End the engine and release the model, on a thread; compilations that wait are
        cancelled.
        """
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._loaded.close)

    def _lost(self, why: str) -> None:
        """Report the end of the engine to the event loop. Runs on the engine's thread, or a
        rank's.
        """
        call_soon(self._loop, partial(self._lose, RankError(why)))

    def _lose(self, loss: EngineError) -> None:
        self.loss = loss
        self._sinks.fail(loss)  # Requests whose end the engine could not report.
        self.lost.set()

    def _step_done(self) -> None:
        """Pass the deltas of a step to the event loop, all at once. Runs on the engine's thread."""
        if self._news:
            deltas = self._news.copy()
            self._news.clear()
            call_soon(self._loop, partial(self._sinks.deliver, deltas))


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    """Have the event loop call `call`, from any thread. False if the loop has ended
    meanwhile.
    """
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True
