"""Milliseconds of the stages of one step: the only clock of speculation."""

from time import perf_counter

from forerun.control.report import STAGES


class StageTimer:
    """Counts for one step, from now on.

    since     when it was begun, or when the step before it was over (perf_counter)
    ms        by the names of STAGES
    known_ms  until its outcome was known
    """

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)
        self.since = self._last = perf_counter()
        self.known_ms = 0.0

    def resume(self) -> None:
        """A stage begins now: what went before belongs to none."""
        self._last = perf_counter()

    def known(self, before: float) -> None:
        """The outcome is known. A step that was begun before the one before it was over has what is
        left of the time since then.
        """
        self.since = max(self.since, before)
        self.known_ms = 1000.0 * (perf_counter() - self.since)

    def lap(self, stage: str) -> None:
        """The stage that began with the last lap, or `resume`, ends now."""
        now = perf_counter()
        self.ms[stage] += 1000.0 * (now - self._last)
        self._last = now
