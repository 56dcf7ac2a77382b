"""Matchers in processes of their own, for expensive grammars.

A call into a matcher cannot be interrupted, and a grammar of 185 bytes can make it last seconds.
Such a matcher therefore runs in a process that can be killed, and no thread waits for it: its
sequence takes no part in a step until its mask has arrived. It drafts nothing.
"""

import base64
import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from queue import SimpleQueue
from time import monotonic
from typing import Any

from forerun.constrain.isolation.fair_queue import PrioritySemaphore
from forerun.constrain.matcher.automaton import MatcherAnswer, Vocabulary
from forerun.constrain.matcher.limits import CALL_SECONDS
from forerun.errors import EngineError
from forerun.sandbox import Fault, SandboxProcess

log = logging.getLogger(__name__)

MAX_PROCESSES = 16
"""Most matching processes at one time; further matchers wait. Each process takes up to 100 MB."""

MAX_WORKING = 4
"""Most of them that may compute at one time: each takes a processor."""

COMMAND = (sys.executable, "-m", "forerun.constrain.isolation.matcher_worker")


class RemoteMatchers:
    """The matching processes of one tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.free = threading.Semaphore(MAX_PROCESSES)
        self.working = PrioritySemaphore(MAX_WORKING)
        self._vocabulary = vocabulary

    def process(self) -> SandboxProcess:
        """Return a new matching process, not started yet; it receives the vocabulary when it
        starts.
        """
        return SandboxProcess(
            COMMAND, CALL_SECONDS, self._init_message, self._encoded, stateful=True
        )

    @cached_property
    def _init_message(self) -> str:
        tokens = self._vocabulary
        ids = range(tokens.vocab_size)
        return json.dumps({
            "tokens": [tokens.token_bytes(id).hex() for id in ids],
            "eos_ids": tokens.eos_ids,
            "bos_id": tokens.bos_id,
            "special_ids": sorted(tokens.special_ids),
        })  # fmt: skip

    def _encoded(self, question: Any) -> list[int]:
        """Encode a text for the process, which has no tokenizer."""
        return self._vocabulary.encode_within(question)


class RemoteMatcher:
    """Runs one sequence's matcher in another process (AsyncMatcher). Its methods never block; a
    thread of its own communicates with the process.

    grammar   in llguidance's form
    answered  called on that thread for every answer
    """

    def __init__(
        self, matchers: RemoteMatchers, grammar: str, answered: Callable[[], None]
    ) -> None:
        self._matchers, self._grammar = matchers, grammar
        self._answered = answered
        self._jobs: SimpleQueue[list[int] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked = self._heard = 0
        self._answer = MatcherAnswer()
        self._process = matchers.process()
        self._closed = threading.Event()
        self._started = False
        # Seconds that answers have taken.
        self._worked = 0.0

    @property
    def ready(self) -> bool:
        """Whether all tokens that were taken are answered."""
        with self._lock:
            return self._heard == self._asked

    @property
    def answer(self) -> MatcherAnswer:
        """The latest answer; once `ready`, that for the last tokens."""
        with self._lock:
            return self._answer

    def take(self, tokens: Sequence[int]) -> None:
        """Send decided tokens to the process; returns at once. The first call starts a thread,
        which may wait for a free process.
        """
        with self._lock:
            self._asked += 1
        self._jobs.put(list(tokens))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="forerun-matcher", daemon=True).start()

    def close(self) -> None:
        """Kill the process; `answered` is not called any more. The matcher cannot be used again."""
        self._closed.set()
        self._jobs.put(None)
        self._process.kill()

    def _run(self) -> None:
        with self._matchers.free:
            try:
                failed = self._serve()
            except Exception as error:
                if not self._closed.is_set():
                    foreseen = isinstance(error, EngineError)
                    log.warning("a grammar cannot be followed: %s", error, exc_info=not foreseen)
                failed = MatcherAnswer(error="The process that it runs in failed", lost=True)
            finally:
                self._process.close()
        while failed is not None and not self._closed.is_set():
            self._publish(failed)  # Every later call gets the same answer.
            if self._jobs.get() is None:
                return

    def _serve(self) -> MatcherAnswer | None:
        """Send jobs to the process until the queue ends. Returns the failure, or None."""
        first: dict[str, Any] = {"begin": self._grammar}
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            with self._matchers.working.place(self._worked):
                if self._closed.is_set():  # Closed while it waited: begin nothing.
                    return None
                begun = monotonic()
                reply = self._process.ask({**first, "take": job})
                self._worked += monotonic() - begun
            first = {}
            if reply is None:
                return self._failure()
            if reply["error"]:
                return MatcherAnswer(error=reply["error"])
            self._publish(MatcherAnswer(base64.b64decode(reply["mask"]), reply["complete"]))
        return None

    def _failure(self) -> MatcherAnswer:
        fault = self._process.fault or Fault.DIED
        words = fault.words(self._process.seconds)
        message = f"The allowed next tokens cannot be computed: {words}"
        return MatcherAnswer(error=message, lost=fault.ours)

    def _publish(self, answer: MatcherAnswer) -> None:
        with self._lock:
            self._answer = answer
            self._heard += 1
        self._answered()
