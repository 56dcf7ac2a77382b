"""Counts the requests that are being answered, and waits for them at the end."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("forerun.serve")


class InFlight:
    """Counts the requests that are being answered. Used on the event loop.

    draining  no more requests are accepted
    """

    def __init__(self) -> None:
        self.draining = False
        self._active = 0
        self._idle = asyncio.Event()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Return a context for an answer that `drain` waits for."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Reject new requests and wait at most `seconds` for running ones. Returns True if all
        ended.
        """
        self.draining = True
        if not self._active:
            return True
        log.info("draining: %d requests have %g s to finish", self._active, seconds)
        try:
            async with asyncio.timeout(seconds):
                while self._active:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
