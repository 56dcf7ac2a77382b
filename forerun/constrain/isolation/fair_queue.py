"""Who comes next where work of very different sizes waits for few workers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

FORGET = 30.0
"""Seconds after which half of what a client has used is forgotten."""


class FairQueue:
    """One at a time. Next is whoever has the smallest sum of when it came, what it is expected to
    take, and what its client has used of late, all in seconds: small work passes large work, a
    client with little one with much, and nobody waits for ever.

    clock  seconds that only grow
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._busy = False
        self._numbers = itertools.count()
        # What each client has used, and until when that is reckoned.
        self._used: dict[str, tuple[float, float]] = {}

    @contextmanager
    def place(self, client: str, cost: float) -> Iterator[None]:
        """A context manager: wait until nobody works and this is next, then hold the one place
        until it is left.

        client  whose use of late counts
        cost    seconds of work expected

        The seconds it was held are added to what the client has used.
        """
        with self._changed:
            place = self._clock() + cost + self._of(client), next(self._numbers)
            self._waiting.append(place)
            self._changed.wait_for(lambda: not self._busy and min(self._waiting) == place)
            self._waiting.remove(place)
            self._busy = True
        begun = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                now = self._clock()
                self._used[client] = self._of(client) + now - begun, now
                self._forget(now)
                self._changed.notify_all()

    def _of(self, client: str) -> float:
        """What a client has used, as far as it is not forgotten."""
        used, when = self._used.get(client, (0.0, 0.0))
        return float(used * 0.5 ** ((self._clock() - when) / FORGET))

    def _forget(self, now: float) -> None:
        """Clients who have not come for long."""
        if len(self._used) > 1024:
            self._used = {
                client: (used, when)
                for client, (used, when) in self._used.items()
                if now - when < 10 * FORGET
            }


class LeastWorkedFirst:
    """So many at a time. Next is who has worked least: an answer of seconds holds up nobody whose
    answers take milliseconds for longer than one of them.

    count  how many have a turn at one time
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    @contextmanager
    def place(self, worked: float) -> Iterator[None]:
        """A context manager: wait until one of the places is free and this is next, then hold it.

        worked  seconds worked in all turns so far; the smallest comes first
        """
        with self._changed:
            place = worked, next(self._numbers)
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
