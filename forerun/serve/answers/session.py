"""One generation between a client and the engine, from submission to its end."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from types import TracebackType
from typing import Self

from msgspec.structs import replace
from starlette.types import Receive

from forerun.engine.request import GRAMMAR_LIMIT, Delta, Finish, SpeculationStats
from forerun.options.config import ServeSettings
from forerun.serve.answers.service import Served
from forerun.serve.bodies.prepare import Generation
from forerun.serve.http.errors import ApiError, ClientGoneError, stuck, unavailable
from forerun.types import RequestId

PassOn = Callable[[list[tuple[int, Delta]]], bool]
"""Counts (index of the choice, delta) pairs in the tally and passes them on; or does neither and
returns False.
"""

MERGE_AT = 64
"""Number of queued deltas from which they are merged: a slow reader gets larger pieces."""


@dataclass(slots=True)
class Tally:
    """Counts over all choices of one generation so far.

    generation    what was submitted
    began, first  when it was submitted and when the first tokens came, on the monotonic clock
    """

    generation: Generation
    began: float = field(default_factory=monotonic)
    first: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    stats: tuple[SpeculationStats, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all prompts of the generation together."""
        return self.generation.prompt_tokens

    def add(self, delta: Delta) -> None:
        """Count one delta: its tokens, when the first came, and the statistics of a choice that
        ended.
        """
        if delta.tokens and self.first is None:
            self.first = monotonic()
        self.output_tokens += len(delta.tokens)
        self.cached_tokens += delta.cached_tokens if delta.index == 0 else 0
        self.stats += (delta.stats,) if delta.stats is not None else ()


class GenerationSession:
    """Submits a generation, passes its deltas on, and aborts it when its client disconnects.

        with GenerationSession(...) as session:
            async for deltas in session.deltas():
                ...

    Leaving the block aborts what still runs. When the client closes its connection, the engine gets
    the abort at once, whatever this task waits for, and drops the request before its next step.
    """

    def __init__(
        self,
        generation: Generation,
        served: Served,
        settings: ServeSettings,
        receive: Receive,
    ) -> None:
        self.generation = generation
        self.tally = Tally(generation)
        self.events = EventQueue(served.meter.gap.add, self._pass_on)
        self.engine = served.engine
        self._settings = settings
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._gone = self._aborting = False
        self._passing: PassOn | None = None
        self._cut = generation.cut() if generation.cut is not None else None
        # Choices that still run, and the index of the first choice, by request.
        self._open: dict[RequestId, int] = {}
        # Requests that are not submitted yet, the next one last.
        self._left = list(generation.requests)[::-1]
        firsts = enumerate(generation.requests)
        self._first = {request.id: place * generation.n for place, request in firsts}

    def __enter__(self) -> Self:
        """Submit. Raises RequestError (BusyError, ContextError) and EngineError."""
        try:
            self._submit()
        except Exception:
            self._abort()
            raise
        self._watcher = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Abort what still runs."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._abort()

    @property
    def ended(self) -> bool:
        """Whether no choice runs any more."""
        return not self._open

    def abort(self) -> None:
        """Abort what still runs, for an abort route: `deltas` raises so that the client gets the
        reason.
        """
        self._aborting = True
        self._abort()

    async def deltas(self, pass_on: PassOn | None) -> AsyncGenerator[list[tuple[int, Delta]]]:
        """Yield lists of (index of the choice, delta) as they come; an empty list after a silence.
        Raises ApiError or ForerunError if the engine ended the request, ClientGoneError.

        pass_on  called with deltas that end no choice, while this generator waits for some: those
                 that it passes on are not yielded, and no task has to run for them
        """
        self._passing = pass_on if self._cut is None else None
        settings = self._settings
        deadline = monotonic() + settings.request_seconds
        while self._open:
            deltas = await self.events.take(settings.keep_alive_seconds, deadline)
            if not deltas and not self.engine.alive:
                raise unavailable("The engine has stopped.", "engine_stopped")
            if not deltas and (error := stuck(self.engine.step_began, settings.watchdog_seconds)):
                raise error
            if monotonic() >= deadline:
                raise ApiError(
                    504,
                    f"The answer took longer than {settings.request_seconds:g} s.",
                    "timeout",
                )
            news = [self._counted(self._shortened(delta)) for delta in deltas]
            self._submit()
            yield news

    async def collect(self) -> list[tuple[int, Delta]]:
        """Return (index, merged delta) of all choices, in order, once they have ended. Raises what
        `deltas` raises.
        """
        parts: dict[int, list[Delta]] = {}

        def pass_on(news: list[tuple[int, Delta]]) -> bool:
            for index, delta in news:
                self.tally.add(delta)
                parts.setdefault(index, []).append(delta)
            return True

        async with aclosing(self.deltas(pass_on)) as pieces:
            async for news in pieces:
                for index, delta in news:
                    parts.setdefault(index, []).append(delta)
        return [(index, merged(parts[index])[0]) for index in sorted(parts)]

    def _pass_on(self, deltas: list[Delta]) -> bool:
        """Pass deltas on, if they end no choice. Returns False if the generator has to run."""
        if self._passing is None or any(delta.finish is not None for delta in deltas):
            return False
        return self._passing([(self._first[one.request] + one.index, one) for one in deltas])

    def _submit(self) -> None:
        """Submit requests, as many as may be in flight. Raises what the engine raises."""
        limit = self.generation.at_once
        while self._left and (limit is None or len(self._open) < limit):
            request = self._left.pop()
            self.engine.submit(request, self.events)
            self._open[request.id] = request.n

    def _shortened(self, delta: Delta) -> Delta:
        """Return the delta; or, if the generation's `cut` ends the text within it, its beginning as
        the end of the answer, after aborting the rest. An ending with an error is unchanged.
        """
        if self._cut is None or delta.finish in (Finish.ERROR, Finish.ABORT):
            return delta
        began = self.tally.first
        shortened = self._cut(delta.text, 0.0 if began is None else monotonic() - began)
        if shortened is None:
            return delta
        if delta.finish is None:
            self.engine.abort(delta.request)
        return replace(delta, text=shortened, finish=Finish.LENGTH, stop_reason=None)

    def _counted(self, delta: Delta) -> tuple[int, Delta]:
        self.tally.add(delta)
        if delta.finish is not None:
            self._open[delta.request] -= 1
            if not self._open[delta.request]:
                del self._open[delta.request]
        if delta.finish == Finish.ERROR:
            status = 400 if delta.code == GRAMMAR_LIMIT else 500
            message = delta.error or "The engine failed."
            raise ApiError(status, message, delta.code or "engine_error")
        if delta.finish == Finish.ABORT:
            raise self._aborted()
        return self._first[delta.request] + delta.index, delta

    def _aborted(self) -> Exception:
        """Return the error for a request that the engine ended early."""
        if self._gone:
            return ClientGoneError()
        if self._aborting:
            return ApiError(400, "The request was aborted through /abort_request.", "aborted")
        if not self.engine.alive:
            message = "The server is shutting down and cut this answer short."
            return unavailable(message, "shutting_down")
        return ApiError(500, "The request was aborted before its end.", "aborted")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._abort()
        self.events.fail(ClientGoneError())

    def _abort(self) -> None:
        self._left.clear()
        for request in self._open:
            self.engine.abort(request)


class EventQueue:
    """A Sink for the requests of one HTTP request; holds the deltas that its reader has not read.

    The engine never waits for a client. Unread deltas are queued here, and merged to one per choice
    once they are many; they are bounded by the tokens the request may have. All on the event loop.

    gap      called with the seconds between two deltas of one choice
    pass_on  called with deltas that `take` waits for; if it returns True, `take` waits on
    last     when the latest delta with tokens came, on the monotonic clock
    """

    def __init__(
        self, gap: Callable[[float], None], pass_on: Callable[[list[Delta]], bool] = lambda _: False
    ) -> None:
        self.last: float | None = None
        self._gap = gap
        self._pass_on = pass_on
        self._heard = 0.0  # When `take` was called, or deltas were passed on since.
        self._news: list[Delta] = []
        self._merge_at = MERGE_AT
        self._last_at: dict[tuple[str, int], float] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, deltas: list[Delta]) -> None:
        """Implement Sink.put: pass deltas on, or queue them until `take`. Many unread ones are
        merged.
        """
        now = monotonic()
        for delta in deltas:
            if delta.tokens:
                choice = delta.request, delta.index
                if (before := self._last_at.get(choice)) is not None:
                    self._gap(now - before)
                self._last_at[choice] = self.last = now
        if self._waiter is not None and not self._waiter.done():
            try:
                if self._pass_on(merged(deltas) if len(deltas) > 1 else deltas):
                    self._heard = now
                    return
            except Exception as error:  # noqa: BLE001 - `take` raises it.
                self.fail(error)
                return  # They may be counted already.
        self._news += deltas
        if len(self._news) >= self._merge_at:
            self._news = merged(self._news)
            # With many choices merging helps little: do not try again at once.
            self._merge_at = MERGE_AT + 2 * len(self._news)
        self._nudge()

    def fail(self, error: Exception) -> None:
        """Implement Sink.fail: make `take` raise the first error, after the deltas before it."""
        self._error = self._error or error
        self._nudge()

    async def take(self, silence: float, deadline: float = math.inf) -> list[Delta]:
        """Return new deltas, one per choice; none after `silence` seconds without any, or at
        the deadline. Raises the error of `fail` after all earlier deltas have been read.
        """
        loop = asyncio.get_running_loop()
        self._heard = monotonic()
        while not (self._news or self._error):
            seconds = min(self._heard + silence, deadline) - monotonic()
            if seconds <= 0.0:
                break
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, self._nudge)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._error is not None and not self._news:
            raise self._error
        news, self._news = self._news, []
        return merged(news) if len(news) > 1 else news

    def _nudge(self) -> None:
        """Wake a waiting `take`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(news: Iterable[Delta]) -> list[Delta]:
    """Merge deltas to one per choice with the content of all of them, choices in order of
    appearance.
    """
    choices: dict[tuple[str, int], list[Delta]] = {}
    for delta in news:
        choices.setdefault((delta.request, delta.index), []).append(delta)
    return [_joined(deltas) for deltas in choices.values()]


def _joined(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        tokens=tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=deltas[0].prompt_logprobs,
        cached_tokens=deltas[0].cached_tokens,
        trace=tuple(chain.from_iterable(delta.trace for delta in deltas)),
    )
