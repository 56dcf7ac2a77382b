"""Fair scheduling of tasks of very different sizes on few workers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

FORGET = 30.0
"""Half-life of a client's use, in seconds."""


class PrioritySemaphore:
    """Admits at most `count` callers at once; of those that wait, the one with the lowest rank is
    next. If the rank is the time that a client has used, an answer of seconds delays answers of
    milliseconds by at most one turn.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @contextmanager
    def place(self, rank: float) -> Iterator[None]:
        """Wait until a place is free and this caller is next, then hold the place while the context
        lasts.
        """
        with self._changed:
            place = rank, next(self._numbers)
            self._waiting.append(place)
            self._changed.wait_for(lambda: self._free > 0 and min(self._waiting) == place)
            self._waiting.remove(place)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


class FairQueue:
    """Admits one task at a time. Next is the one with the smallest sum of arrival time, expected
    cost, and its client's recent use, all in seconds: short tasks overtake long ones, clients with
    little use those with much, and every task is admitted eventually.

    clock  seconds, monotonic
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._places = PrioritySemaphore(1)
        self._lock = threading.Lock()
        # (use of each client, time at which it was computed).
        self._used: dict[str, tuple[float, float]] = {}

    @contextmanager
    def place(self, client: str, cost: float) -> Iterator[None]:
        """Wait for the turn, then hold the one place while the context lasts. The seconds that it
        lasted are added to the client's use.

        client  to charge
        cost    seconds that the task is expected to take
        """
        with self._lock:
            rank = self._clock() + cost + self._of(client)
        with self._places.place(rank):
            begun = self._clock()
            try:
                yield
            finally:
                with self._lock:
                    now = self._clock()
                    self._used[client] = self._of(client) + now - begun, now
                    self._forget(now)

    def _of(self, client: str) -> float:
        """Return a client's use, in seconds, after its decay."""
        used, when = self._used.get(client, (0.0, 0.0))
        return float(used * 0.5 ** ((self._clock() - when) / FORGET))

    def _forget(self, now: float) -> None:
        """Drop clients whose use has decayed."""
        if len(self._used) > 1024:
            self._used = {
                client: (used, when)
                for client, (used, when) in self._used.items()
                if now - when < 10 * FORGET
            }
