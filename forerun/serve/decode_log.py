"""One log line about decoding every so many steps."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from forerun.engine.stats import Stats

LOOK_SECONDS = 0.5
"""How often the number of steps is checked: a line is at most this late."""

log = logging.getLogger("forerun.serve")


class DecodeLog:
    """Says what the engine did since it last spoke.

    interval  steps between two lines
    last      what it had done before
    clock     seconds that only grow
    """

    def __init__(self, interval: int, last: Stats, clock: Callable[[], float] = monotonic) -> None:
        self._interval, self._clock = interval, clock
        self._last, self._time = last, clock()

    def look(self, now: Stats) -> str | None:
        """The line to log, if the engine made `interval` steps since the last one; else None.
        Remembers `now`.
        """
        if now.steps - self._last.steps < self._interval:
            return None
        before, seconds = self._last, self._clock() - self._time
        self._last, self._time = now, self._clock()
        draft_tokens = now.draft_tokens - before.draft_tokens
        accepted = now.accepted - before.accepted
        rate = f"{accepted / draft_tokens:.2f}" if draft_tokens else "none drafted"
        speed = (now.output_tokens - before.output_tokens) / max(seconds, 1e-9)
        load = now.load
        return (
            f"decode: running {load.running}, queue {load.waiting}, "
            f"tokens {now.output_tokens - before.output_tokens} in "
            f"{now.steps - before.steps} steps, {speed:.1f} tokens/s, "
            f"cache {load.pages_held / max(load.pages, 1):.0%}, "
            f"acceptance length {now.acceptance_length:.2f}, rate {rate}"
        )

    async def run(self, stats: Callable[[], Awaitable[Stats]]) -> None:
        """Check every LOOK_SECONDS and log, until cancelled. stats: returns the engine's
        counters.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            line = self.look(await stats())
            if line is not None:
                log.info("%s", line)
