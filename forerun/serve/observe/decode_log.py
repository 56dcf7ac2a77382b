"""Logs lines about prompts and decoding at intervals of steps, in SGLang's format."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from forerun.engine.stats import Stats

LOOK_SECONDS = 0.5
"""Seconds between checks of the number of steps: a line is late by at most this."""

log = logging.getLogger("forerun.serve")


class DecodeLog:
    """Logs what the engine did since the last line.

    interval  steps between two lines
    last      the counters at the last line
    clock     seconds, monotonic
    """

    def __init__(self, interval: int, last: Stats, clock: Callable[[], float] = monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._last, self._time = last, clock()

    def look(self, now: Stats) -> list[str]:
        """Return the lines to log if the engine ran `interval` steps since the last ones; else
        none. Stores `now`.
        """
        if now.steps - self._last.steps < self._interval:
            return []
        before, seconds = self._last, self._clock() - self._time
        self._last, self._time = now, self._clock()
        load, lines = now.load, []
        usage = f"token usage: {load.pages_held / max(load.pages, 1):.2f}"
        queue = f"#running-req: {load.running}, #queue-req: {load.waiting}"
        if read := now.prompt_tokens - before.prompt_tokens:
            cached = now.cached_tokens - before.cached_tokens
            lines.append(
                f"Prefill batch. #new-token: {read - cached}, #cached-token: {cached}, "
                f"{usage}, {queue}"
            )
        if generated := now.output_tokens - before.output_tokens:
            draft_tokens = now.draft_tokens - before.draft_tokens
            accepted = now.accepted - before.accepted
            rate = f"{accepted / draft_tokens:.2f}" if draft_tokens else "none drafted"
            lines.append(
                f"Decode batch. #token: {generated}, #step: {now.steps - before.steps}, {usage}, "
                f"accept len: {now.acceptance_length:.2f}, accept rate: {rate}, "
                f"gen throughput (token/s): {generated / max(seconds, 1e-9):.2f}, {queue}"
            )
        return lines

    async def run(self, stats: Callable[[], Awaitable[Stats]]) -> None:
        """Check every LOOK_SECONDS and log, until cancelled. stats: returns the engine's
        counters.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for line in self.look(await stats()):
                log.info("%s", line)
