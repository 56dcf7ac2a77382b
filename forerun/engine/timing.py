"""Milliseconds of the stages of one step: the only clock of speculation."""

from time import perf_counter

from forerun.control.report import STAGES


class StageTimer:
    """Counts for one step, from now on.

    since  when it was begun (perf_counter)
    ms     by the names of STAGES
    """

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)
        self.since = self._last = perf_counter()

    def resume(self) -> None:
        """A stage begins now: what went before belongs to none."""
        self._last = perf_counter()

    def lap(self, stage: str) -> None:
        """The stage that began with the last lap, or `resume`, ends now."""
        now = perf_counter()
        self.ms[stage] += 1000.0 * (now - self._last)
        self._last = now
