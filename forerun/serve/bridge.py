"""From the engine's thread to the event loop: one wake-up for all news of a step.

The engine never waits for a client. What a client has not read yet lies in its mailbox, merged
to one delta per choice once it is many; it is bounded by the tokens the request may have.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from time import monotonic

from forerun.engine.request import Delta

MERGE_AT = 64
"""Deltas in a mailbox that are merged: a reader this far behind gets larger pieces."""

log = logging.getLogger("forerun.serve")


class EventQueue:
    """The news of one HTTP request. `put` on the engine's thread, the rest on the event loop.

    first, last  when the first and the latest news with tokens came, on the monotonic clock
    """

    def __init__(self, bridge: "Bridge", gap: Callable[[float], None]) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._bridge = bridge
        self._gap = gap
        self._lock = threading.Lock()
        self._news: list[Delta] = []
        self._merge_at = MERGE_AT
        self._heard: dict[tuple[str, int], float] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._expired = False

    def put(self, delta: Delta) -> None:
        """A Sink: take in one delta. Neither waits for the event loop nor raises."""
        if delta.tokens:
            self._time(delta)
        with self._lock:
            self._news.append(delta)
            if len(self._news) >= self._merge_at:
                self._news = merged(self._news)
                # With many choices merging helps little: do not try again at once.
                self._merge_at = MERGE_AT + 2 * len(self._news)
        self._bridge.wake(self)

    async def take(self, patience: float) -> list[Delta]:
        """What is new, one delta per choice; nothing after `patience` seconds or `close`."""
        loop = asyncio.get_running_loop()
        self._expired = False
        timer = loop.call_later(patience, self._expire)
        try:
            while not (self._news or self._expired or self._closed):
                self._waiter = loop.create_future()
                await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        with self._lock:
            news, self._news = self._news, []
        return merged(news)

    def close(self) -> None:
        """Nobody will read any more; a waiting `take` returns at once."""
        self._closed = True
        self.nudge()

    def nudge(self) -> None:
        """Let a waiting `take` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._expired = True
        self.nudge()

    def _time(self, delta: Delta) -> None:
        now, choice = monotonic(), (delta.request, delta.index)
        self.first = self.first or now
        self.last = now
        before = self._heard.get(choice)
        self._heard[choice] = now
        if before is not None:
            self._gap(now - before)


class Bridge:
    """Wakes the event loop on behalf of the engine's thread.

    gap  is told the seconds between two pieces of news of one choice, on the engine's thread
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, gap: Callable[[float], None]) -> None:
        self._loop = loop
        self._gap = gap
        self._lock = threading.Lock()
        self._ready: list[EventQueue] = []

    def events(self) -> EventQueue:
        """A new mailbox on this bridge."""
        return EventQueue(self, self._gap)

    def wake(self, events: EventQueue) -> None:
        """Have `events` looked at soon. Only the first of several calls crosses threads."""
        with self._lock:
            self._ready.append(events)
            if len(self._ready) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            log.debug("news after the event loop has ended")

    def _deliver(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for events in ready:
            events.nudge()


def merged(news: Iterable[Delta]) -> list[Delta]:
    """One delta per choice that says what all of them say, choices in order of appearance."""
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
