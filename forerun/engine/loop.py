"""The engine's own thread. A turn handles the requests of other threads and runs one step."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from forerun.engine.options import EngineOptions
from forerun.engine.overlap import make_core
from forerun.engine.parts import Parts
from forerun.engine.request import Finish
from forerun.engine.row_output import Ending
from forerun.engine.sequence import Sequence
from forerun.errors import RankError
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")

QUIET = 0.05
"""Seconds without work after which the engine counts as idle and checks itself."""


class EngineLoop:
    """What runs on the engine's thread. thread.py has the methods for other threads.

    step_began  when the current step began (time.monotonic); None between steps
    """

    def __init__(self, parts: Parts, options: EngineOptions) -> None:
        self._core = make_core(parts, options, self._ended)
        self._checked = False
        self._step_done: Callable[[], None] = lambda: None
        # Shared with other threads, under the lock of `_changed`:
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._ids: set[RequestId] = set()
        self._entering = 0
        self._draining = False
        self._stopping = False
        self._broken: str | None = None
        self._lost: Callable[[str], None] = lambda _: None
        self.step_began: float | None = None

    def _run(self) -> None:
        while self._broken is None:
            with self._changed:
                # After QUIET seconds without work one turn checks for leaks; then no time-out.
                patience = None if self._checked else QUIET
                self._changed.wait_for(
                    lambda: self._inbox or self._core.busy or self._stopping, patience
                )
                if self._stopping:
                    break
            self.step_began = monotonic()
            self.step_once()
            self.step_began = None
            if self._draining:
                with self._changed:
                    self._changed.notify_all()
        self._stop()

    def step_once(self) -> bool:
        """Run one turn. Returns False if there was no sequence; the first such turn checks for
        leaks. If a turn raises, the engine ends all requests with an error and takes no more.
        """
        try:
            self._take_inbox()
            busy = self._core.step()
            self._step_done()
            if not busy and not self._checked:
                self._core.check()
            self._checked = not busy
        except Exception as error:
            log.exception("the engine failed and gives up")
            self._give_up(f"The engine failed and gave up: {error or type(error).__name__}")
            if isinstance(error, RankError):
                self._lost(str(error))
            return False
        return busy

    def _take_inbox(self) -> None:
        while self._inbox:
            with self._changed:
                order = self._inbox.popleft()
            order()
            self._step_done()

    def _enter(self, sequences: list[Sequence]) -> None:
        """Move a submitted request into the queue."""
        self._core.add(sequences)
        with self._changed:
            self._entering -= len(sequences)

    def _ended(self, request: RequestId) -> None:
        """Remove a request whose last choice has ended and is about to be reported."""
        with self._changed:
            self._ids.discard(request)
            self._changed.notify_all()

    def _stop(self) -> None:
        self._take_inbox()
        self._core.end_all(Ending(Finish.ABORT))
        self._step_done()

    def _give_up(self, message: str) -> None:
        with self._changed:
            self._broken = message
            self._changed.notify_all()
        self._core.abandon()
        self._take_inbox()
        self._core.end_all(Ending(Finish.ERROR, error=message))
        self._step_done()
