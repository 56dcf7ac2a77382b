"""The deltas of one HTTP request, between the engine's client and the writer of the answer.

The engine never waits for a client. Unread deltas are queued here, and merged to one per choice
once they are many; they are bounded by the tokens the request may have. All on the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from time import monotonic

from msgspec.structs import replace

from forerun.engine.request import Delta
from forerun.errors import ForerunError

MERGE_AT = 64
"""Deltas in a queue that are merged: a reader this far behind gets larger pieces."""


class EventQueue:
    """A Sink for the requests of one HTTP request.

    gap          called with the seconds between two deltas of one choice
    first, last  when the first and the latest delta with tokens came, on the monotonic clock
    """

    def __init__(self, gap: Callable[[float], None]) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._gap = gap
        self._news: list[Delta] = []
        self._merge_at = MERGE_AT
        self._heard: dict[tuple[str, int], float] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: ForerunError | None = None
        self._closed = False
        self._expired = False

    def put(self, delta: Delta) -> None:
        """Queue a delta until `take`, as Sink.put. Many unread deltas are merged."""
        if delta.tokens:
            self._time(delta)
        self._news.append(delta)
        if len(self._news) >= self._merge_at:
            self._news = merged(self._news)
            # With many choices merging helps little: do not try again at once.
            self._merge_at = MERGE_AT + 2 * len(self._news)
        self._nudge()

    def fail(self, error: ForerunError) -> None:
        """Make `take` raise `error` once all is read that came before, as Sink.fail."""
        self._error = error
        self._nudge()

    async def take(self, patience: float) -> list[Delta]:
        """Return what is new, one delta per choice; nothing after `patience` seconds or `close`.
        Raises the engine's failure after all earlier deltas have been read.
        """
        loop = asyncio.get_running_loop()
        self._expired = False
        timer = loop.call_later(patience, self._expire)
        try:
            while not (self._news or self._expired or self._closed or self._error):
                self._waiter = loop.create_future()
                await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        if self._error is not None and not self._news:
            raise self._error
        news, self._news = self._news, []
        return merged(news)

    def close(self) -> None:
        """Stop reading; a waiting `take` returns at once."""
        self._closed = True
        self._nudge()

    def _nudge(self) -> None:
        """Let a waiting `take` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._expired = True
        self._nudge()

    def _time(self, delta: Delta) -> None:
        now, choice = monotonic(), (delta.request, delta.index)
        self.first = self.first or now
        self.last = now
        before = self._heard.get(choice)
        self._heard[choice] = now
        if before is not None:
            self._gap(now - before)


def merged(news: Iterable[Delta]) -> list[Delta]:
    """Merge news into one delta per choice that says what all of them say, choices in order of
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
