"""One line about decoding every so many steps, for who watches the log."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from forerun.engine.metrics import Stats

LOOK_SECONDS = 0.5
"""How often the number of steps is looked at: a line comes this much late, at most."""

log = logging.getLogger("forerun.serve")


class DecodeLog:
    """Says what the engine did since it last spoke.

    interval  steps between two lines
    clock     seconds that only grow
    """

    def __init__(
        self, interval: int, stats: Callable[[], Stats], clock: Callable[[], float] = monotonic
    ) -> None:
        self._interval, self._stats, self._clock = interval, stats, clock
        self._last, self._time = stats(), clock()

    def look(self) -> str | None:
        """The line, if the engine made `interval` steps since the last one."""
        now = self._stats()
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

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            line = self.look()
            if line is not None:
                log.info("%s", line)
