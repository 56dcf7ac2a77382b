"""Scheduling of work of very different sizes on few workers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

FORGET = 30.0
"""Seconds after which half of what a client has used is forgotten."""


class LeastFirst:
    """Gives `count` clients a turn at a time, the one with the least rank next. Ranked by the time
    they have used, an answer of seconds delays answers of milliseconds by at most one of them.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @contextmanager
    def place(self, rank: float) -> Iterator[None]:
        """Wait until one of the places is free and this caller is next, then hold it, as a context
        manager.
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
    """Admits one at a time. Next is the one with the smallest sum of arrival time, expected cost,
    and its client's recent use, all in seconds: small work passes large work, a client with little
    use one with much, and no one waits for ever.

    clock  seconds that only grow
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._places = LeastFirst(1)
        self._lock = threading.Lock()
        # What each client has used, and until when that is reckoned.
        self._used: dict[str, tuple[float, float]] = {}

    @contextmanager
    def place(self, client: str, cost: float) -> Iterator[None]:
        """Wait for the turn, then hold the one place until the context is left.

        client  to charge
        cost    seconds of work expected

        The seconds it was held are added to the client's use.
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
        """Return a client's remaining use, which decays."""
        used, when = self._used.get(client, (0.0, 0.0))
        return float(used * 0.5 ** ((self._clock() - when) / FORGET))

    def _forget(self, now: float) -> None:
        """Drop clients that have not come for long."""
        if len(self._used) > 1024:
            self._used = {
                client: (used, when)
                for client, (used, when) in self._used.items()
                if now - when < 10 * FORGET
            }
