"""Functions that another thread has the engine's thread run between steps."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

log = logging.getLogger("forerun.engine")

Answer = TypeVar("Answer")


class ClosedError(Exception):
    """The engine runs no more functions posted to it."""


class EngineCalls:
    """Has the engine's thread run functions. Methods without another note are for the other thread.

    post    calls a function on the engine's thread before its next step; from any thread
    closed  set when the engine's thread runs no more of them
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post, self._posted, self.closed = post, threading.Event(), False

    def wait(self, seconds: float) -> None:
        """Block until the other thread needs the engine's, or `seconds` have passed. On the
        engine's thread.
        """
        self._posted.wait(seconds)
        self._posted.clear()

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` on the engine's thread and return its result. Raises what it raises;
        ClosedError once this is closed.
        """
        return self.answer(self.start(work))

    def start(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Have the engine's thread run `work`."""
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
        """Wait for what `start` began. Raises as `run`."""
        while not self.closed:
            try:
                return answer.result(0.2)
            except TimeoutError:
                continue
        raise ClosedError
