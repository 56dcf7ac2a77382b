"""What a step costs now: what start-up measured, corrected by every step that is run since."""

from bisect import bisect_left
from math import exp, log

import numpy as np

from forerun.control.constants import DECAY, FOLLOW, MIN_REPEATS, OUTLIER
from forerun.control.step_costs import StepCosts

LARGEST = 14
"""Powers of two of nodes up to which corrections have counts of their own: no step has more."""
UNSEEN = 1e-3
"""Steps that what start-up said of a count is worth against one that was seen: none."""


class LiveCosts:
    """Measured costs that follow the machine.

    The measured times are multiplied by two corrections that steps teach: one for all counts of
    nodes, which follows quickly, and one per count, which follows slowly. Choices depend on ratios
    between counts only, so the first keeps a slower machine from looking like a dearer draft token.
    Start-up may have been disturbed: what it measured counts for nothing against steps that were
    seen. `known` tells how many were, `at_most` what a larger one may take if the table is wrong.

    largest  nodes of the largest step that was seen; 0: none was
    steps    that were seen
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured, self.largest = measured, 0
        # Corrections have counts between and beyond those of the table.
        powers = (1 << power for power in range(LARGEST))
        self._counts = tuple(sorted({*measured.nodes, *powers}))
        self._line: list[float] = measured.verify(np.array(self._counts)).tolist()
        # Logarithms of the corrections: of all counts, and of each in _counts.
        self._level, self.steps = 0.0, 0
        self._each = [0.0] * len(self._counts)
        self._seen = [0.0] * len(self._counts)

    def one(self, nodes: int, cached: int) -> float:
        """Milliseconds of a step, drafting not counted.

        nodes   known tokens and draft tokens
        cached  cached tokens that they see, summed over the nodes
        """
        below, above, fraction = self._between(nodes)
        line = self._line[below] + fraction * (self._line[above] - self._line[below])
        each = self._each[below] + fraction * (self._each[above] - self._each[below])
        return exp(self._level + each) * (line + self.measured.attend_ms * cached / 1000.0)

    def known(self, nodes: int) -> float:
        """How many steps of about so many nodes were seen in service."""
        below, above, fraction = self._between(nodes)
        return (1.0 - fraction) * self._seen[below] + fraction * self._seen[above]

    def at_most(self, nodes: int, cached: int, believed: float) -> float:
        """Milliseconds that a step may take if the table is wrong: what is `believed`, and beyond
        the largest step that was seen at least in proportion to that.
        """
        seen = self.largest
        if not 0 < seen < nodes:
            return believed
        return max(believed, self.one(seen, cached * seen // nodes) * nodes / seen)

    def _between(self, nodes: int) -> tuple[int, int, float]:
        """The counts around `nodes`, by index, and how far it is from one to the other."""
        counts = self._counts
        above = min(bisect_left(counts, nodes), len(counts) - 1)
        below = max(above - 1, 0) if nodes < counts[above] else above
        fraction = (
            (nodes - counts[below]) / (counts[above] - counts[below]) if above > below else 1.0
        )
        return below, above, fraction

    def learn(self, nodes: int, ms: float, believed: float) -> None:
        """A step of so many nodes, of which `one` says `believed`, took so long."""
        error = log(max(ms, 1e-6) / max(believed, 1e-6))
        new = self.steps >= MIN_REPEATS and self.known(nodes) < MIN_REPEATS
        self.steps, self.largest = self.steps + 1, max(self.largest, nodes)
        if self.steps > 1:
            error = min(log(2.0 * OUTLIER if new else OUTLIER), error)
        # The first step sets the level: 1/1, 1/2, 1/3, ... is a mean of the first few. What a
        # count says that was not seen before is no news of the machine.
        follow = 0.0 if new else max(FOLLOW, 1.0 / self.steps)
        self._level += follow * error
        error *= 1.0 - follow
        below, above, fraction = self._between(nodes)
        # Both sides learn, the nearer and the less known more (variances 1 / seen, as in a Kalman
        # filter), none more than the error: a lucky step of 65 nodes would make 128 look cheap.
        sides = [(count, w) for count, w in ((above, fraction), (below, 1.0 - fraction)) if w]
        doubts = [w / max(self._seen[count], UNSEEN) for count, w in sides]
        whole = 1.0 + sum(w * doubt for (_, w), doubt in zip(sides, doubts, strict=True))
        for (count, weight), doubt in zip(sides, doubts, strict=True):
            self._each[count] += max((1.0 - DECAY) * weight, min(1.0, doubt / whole)) * error
            self._seen[count] += weight

    def describe(self) -> dict[str, float]:
        """Milliseconds by number of nodes, as believed now, with little context."""
        return {str(count): round(self.one(count, 0), 3) for count in self.measured.nodes}

    @property
    def pace(self) -> float:
        """How much slower steps are now than they were measured; 1 = as measured."""
        return exp(self._level)
