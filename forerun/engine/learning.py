"""Saves what drafter and policy learn, on disk while the server runs, so that a new engine drafts
as this one did: counted tokens of answers at once, estimates at intervals.

    engine's thread                            a thread of its own
    counted     at the end of a sequence   ->  appends them to a journal
    _estimates  before a step              <-  every SAVE_SECONDS
                                           ->  appends them to another

A failure here never ends a request, and no text depends on it.
"""

import logging
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import msgspec
import numpy as np

from forerun.cache.journal import Journal
from forerun.interface.learner import AnswerCounts, Learner
from forerun.types import Ints

log = logging.getLogger("forerun.engine")

SAVE_SECONDS = 60.0
"""Seconds between two records of estimates, if they changed."""
LEAST_WAIT = 1.0
"""Least time-out of a wait for something to write, in seconds."""
QUEUED = 1024
"""Most records that wait for the disk; further ones are dropped."""
PART = 512
"""Most counted tokens of a record."""
CONTEXT = 4
"""Tokens before the counted ones: the longest context that is counted."""
CLOSE_SECONDS = 5.0
"""Most seconds spent writing at shutdown."""
_Estimates = tuple[bytes, dict[str, bytes]]
"""(hash of the settings, the bytes of each learner by name)."""
_ANSWER = struct.Struct("<QI")
"""Header of a record of tokens: their tenant, and how many of them are context only."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """The estimates that an engine learns, and the journals where they are saved.

    answers    journal of counted tokens
    estimates  journal of what learners return
    settings   hash of machine and configuration: estimates of other settings are not used
    counts     of answers; None: answers are not counted
    learners   by name
    """

    answers: Journal
    estimates: Journal
    settings: bytes
    counts: AnswerCounts | None
    learners: Mapping[str, Learner]

    def restore(self) -> tuple[int, set[str]]:
        """Restore what the journals hold, in an engine that does not run yet. Returns how many
        tokens of answers were counted, and the names of the learners that were restored.
        """
        total, newest = 0, dict[str, bytes]()
        for payload in self.answers.read() if self.counts is not None else ():
            assert self.counts is not None
            tenant, first = _ANSWER.unpack_from(payload)
            tokens = np.frombuffer(payload, np.int32, offset=_ANSWER.size)
            self.counts.count(tokens, first, tenant)
            total += len(tokens) - first
        for payload in self.estimates.read():
            with suppress(msgspec.MsgspecError):
                settings, learnt = msgspec.msgpack.decode(payload, type=_Estimates)
                newest = learnt if settings == self.settings else newest
        known = [name for name in self.learners if name in newest]
        return total, {name for name in known if self.learners[name].relearn(newest[name])}

    def record(self) -> bytes:
        """Return the present estimates as a record. Call on the engine's thread."""
        learnt = {name: learner.learnt() for name, learner in self.learners.items()}
        return msgspec.msgpack.encode((self.settings, learnt))


class Learning:
    """Saves what is learned, from a thread of its own. Methods run on the engine's thread unless
    they say otherwise.

    post  calls a function on the engine's thread before its next step; from any thread
    """

    def __init__(self, learnt: Learnt, post: Callable[[Callable[[], None]], None]) -> None:
        self._learnt, self._post = learnt, post
        self._queue = queue.Queue[tuple[Journal, bytes] | None](QUEUED)
        self._last, self._awaited, self._refused = learnt.record(), False, False
        self._written = self._dropped = 0
        if learnt.counts is not None:
            learnt.counts.counted = self.counted
        self._thread = threading.Thread(target=self._work, name="forerun-learn", daemon=True)
        self._thread.start()

    def counted(self, tokens: Ints, first: int, tenant: int) -> None:
        """Queue tokens[first:] of an answer, which were counted for this tenant, to be saved."""
        for begin in range(first, len(tokens), PART):
            context = min(begin, CONTEXT)
            part = tokens[begin - context : begin + PART]
            record = _ANSWER.pack(tenant, context) + part.astype("<i4").tobytes()
            self._put(self._learnt.answers, record)

    def close(self, flush: bool) -> None:
        """End the thread; if `flush`, first write what is queued and the estimates, for at most
        CLOSE_SECONDS. Call after the engine's thread has ended. Idempotent.
        """
        if self._thread.is_alive():
            if flush:
                self._estimates()
            else:
                self._refused = True
            try:
                self._queue.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:  # The disk stalls.
                self._refused = True
            self._thread.join(CLOSE_SECONDS)

    def describe(self) -> dict[str, int]:
        """Return how many records were written and dropped. From any thread."""
        return {"written": self._written, "dropped": self._dropped}

    def _put(self, journal: Journal, payload: bytes) -> None:
        if self._refused or self._queue.full():  # Nothing else puts anything in.
            self._dropped += 1
        else:
            self._queue.put_nowait((journal, payload))

    def _estimates(self) -> None:
        """Queue the estimates if they changed."""
        self._awaited = False
        payload = self._learnt.record()
        if payload != self._last:
            self._last = payload
            self._put(self._learnt.estimates, payload)

    # --- on its own thread ---------------------------------------------------------------

    def _work(self) -> None:
        try:
            for journal, payload in self._jobs():
                stored = not self._refused and self._append(journal, payload)
                self._written += stored
                self._dropped += not stored
        except Exception:
            log.exception("kv-store: what is learnt is not written any more")
        finally:
            self._refused = True
            for journal in (self._learnt.answers, self._learnt.estimates):
                with suppress(OSError):
                    journal.close()

    def _append(self, journal: Journal, payload: bytes) -> bool:
        try:
            return journal.append(payload)
        except OSError as error:
            log.warning("kv-store: what is learnt is not written any more: %s", error)
            self._refused = True
            return False

    def _jobs(self) -> Iterator[tuple[Journal, bytes]]:
        """Yield queued records until the end, and request estimates every SAVE_SECONDS."""
        due = monotonic() + SAVE_SECONDS
        while True:
            if monotonic() >= due and not self._awaited:
                due, self._awaited = monotonic() + SAVE_SECONDS, True
                self._post(self._estimates)
            try:
                job = self._queue.get(timeout=max(due - monotonic(), LEAST_WAIT))
            except queue.Empty:
                continue
            if job is None:
                return
            yield job
