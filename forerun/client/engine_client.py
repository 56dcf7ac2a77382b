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
from forerun.engine.maintenance import forget_prefixes
from forerun.engine.request import Delta, Request
from forerun.engine.stats import Stats
from forerun.errors import EngineError, ForerunError, RankError
from forerun.types import RequestId


class Sink(Protocol):
    """Gets the news of requests, on the event loop."""

    def put(self, delta: Delta) -> None:
        """Of a choice. The last of each choice has `finish` set."""
        ...

    def fail(self, error: ForerunError) -> None:
        """The engine refused the request, or is no more: no delta follows."""
        ...


class Constraint(Protocol):
    """A compiled grammar: what Request.grammar holds.

    unenforced  keywords of schemas that are not enforced, as paths from the request's body
    """

    @property
    def unenforced(self) -> tuple[str, ...]: ...  # noqa: D102


class EngineClient(Protocol):
    """All that a server asks of an engine. On the event loop; nothing here blocks."""

    lost: asyncio.Event
    """Set when a process without which no step can run is gone: its own, or one that shares the
    model."""

    loss: EngineError | None
    """How that came; None = all is well."""

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
        """When the step under way began, or the last sign of life of a process that gives none
        any more (time.monotonic); None between steps.
        """
        ...

    @property
    def pid(self) -> int:
        """Of the process that it runs in."""
        ...

    @property
    def last_stats(self) -> Stats:
        """What `stats` said last."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Where it cannot be honoured, either this raises RequestError or
        EngineError, or the sink fails with it.
        """
        ...

    def abort(self, request: RequestId) -> None:
        """End a request; its last delta follows. Unknown: nothing."""
        ...

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """A grammar for one request. Raises RequestError naming the field and the place at fault,
        BusyError, EngineError.
        """
        ...

    async def stats(self) -> Stats:
        """A snapshot of the counters."""
        ...

    async def describe(self) -> dict[str, Any]:
        """Facts for /server_info: what drafts, and how much."""
        ...

    def forget_prefixes(self) -> None:
        """Forget, before the next step, all pages that no running sequence holds."""
        ...

    async def close(self) -> None:
        """End what runs, and release the model. Idempotent."""
        ...


class Sinks:
    """Who gets the news of which request."""

    def __init__(self) -> None:
        self._open: dict[RequestId, tuple[Sink, int]] = {}

    def add(self, request: Request, sink: Sink) -> None:
        """A request of n choices is submitted."""
        self._open[request.id] = (sink, request.n)

    def drop(self, request: RequestId, error: ForerunError | None = None) -> None:
        """It was refused; its sink fails with `error`, if one is given."""
        sink, _ = self._open.pop(request, (None, 0))
        if sink is not None and error is not None:
            sink.fail(error)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Hand on the news of a step."""
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
        """Nothing will come any more."""
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
        self._engine.listen(self._turned)
        self._engine.when_lost(self._lost)

    @property
    def alive(self) -> bool:
        """See EngineClient."""
        return self._engine.alive

    @property
    def fault(self) -> str | None:
        """See EngineClient."""
        return self._engine.fault

    @property
    def step_began(self) -> float | None:
        """See EngineClient."""
        return self._engine.step_began

    def submit(self, request: Request, sink: Sink) -> None:
        """See EngineClient; raises."""
        self._sinks.add(request, sink)
        try:
            self._engine.submit(request, self._news.append)
        except Exception:
            self._sinks.drop(request.id)
            raise

    def abort(self, request: RequestId) -> None:
        """See EngineClient."""
        self._engine.abort(request)

    async def compile(self, grammar: Grammar, client: str) -> Constraint:
        """See EngineClient."""
        work = partial(self._loaded.target.compile, grammar, client)
        return await self._loop.run_in_executor(self._compiling, work)

    async def stats(self) -> Stats:
        """See EngineClient."""
        self.last_stats = self._engine.stats()
        return self.last_stats

    async def describe(self) -> dict[str, Any]:
        """See EngineClient."""
        return self._engine.describe()

    def forget_prefixes(self) -> None:
        """See EngineClient."""
        forget_prefixes(self._engine)

    async def close(self) -> None:
        """See EngineClient."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._loaded.close)

    def _lost(self, why: str) -> None:
        """On the engine's thread."""
        call_soon(self._loop, partial(self._lose, RankError(why)))

    def _lose(self, loss: EngineError) -> None:
        self.loss = loss
        self.lost.set()

    def _turned(self) -> None:
        """On the engine's thread: the news of a step crosses in one piece."""
        if self._news:
            deltas = self._news.copy()
            self._news.clear()
            call_soon(self._loop, partial(self._sinks.deliver, deltas))


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
    """Call from another thread. False where the loop has ended meanwhile."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True
