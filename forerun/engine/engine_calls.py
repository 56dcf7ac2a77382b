"""Calls from another thread that run on the engine's thread between steps."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

log = logging.getLogger("forerun.engine")

Answer = TypeVar("Answer")


class ClosedError(Exception):
    """The engine's thread has ended, so it runs no more calls."""


class EngineCalls:
    """Runs functions on the engine's thread for another thread, which calls all methods except
    `wait`.

    post    calls a function on the engine's thread before its next step; from any thread
    closed  set when the engine's thread runs no more of them
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post, self._posted, self.closed = post, threading.Event(), False

    def wait(self, seconds: float) -> None:
        """Block until a function is posted, or `seconds` have passed. Called on the engine's
        thread.
        """
        self._posted.wait(seconds)
        self._posted.clear()

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` on the engine's thread and return its result. Raises what `work` raises, and
        ClosedError if the engine's thread has ended.
        """
        return self.answer(self.start(work))

    def start(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Post `work` to the engine's thread and return its future."""
        answer = Future[Answer]()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                log.exception("kv-store: pages could not be copied")
                answer.set_exception(error)

        self._post(run)
        self._posted.set()
        return answer

    def answer(self, answer: Future[Answer]) -> Answer:
        """Wait for a future of `start` and return its result. Raises as `run`."""
        while not self.closed:
            try:
                return answer.result(0.2)
            except TimeoutError:
                continue
        raise ClosedError
