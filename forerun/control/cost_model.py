"""What a step costs: measured at start-up, corrected by every step that is run since."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

import numpy as np

from forerun.control.constants import (
    DECAY,
    FOLLOW,
    LARGEST,
    MIN_REPEATS,
    NEW_OUTLIER,
    OUTLIER_FACTOR,
    UNSEEN,
)
from forerun.types import AnyArray


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured milliseconds of a step.

    nodes      counts of nodes, ascending, at least two; between them time is interpolated,
               beyond them the last slope continues
    verify_ms  time to verify that many nodes with little context
    attend_ms  what a node costs on top for every 1,000 cached tokens it sees
    draft_ms   what proposing one draft token costs, where that is no trifle
    follow_ms  what it costs the drafter, in every step, to follow what was decided
    """

    nodes: tuple[int, ...]
    verify_ms: tuple[float, ...]
    attend_ms: float = 0.0
    draft_ms: float = 0.0
    follow_ms: float = 0.0

    def verify(self, nodes: AnyArray) -> AnyArray:
        """Milliseconds to verify so many nodes; same shape as `nodes`."""
        slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.nodes[-1] - self.nodes[-2])
        beyond = np.maximum(np.asarray(nodes) - self.nodes[-1], 0)
        ms: AnyArray = np.interp(nodes, self.nodes, self.verify_ms) + slope * beyond
        return ms


class LiveCosts:
    """Measured costs that follow the machine.

    What was measured while the machine had other work must not mislead for ever. The measured
    times are multiplied by two corrections that steps teach: one for all counts of nodes,
    which follows quickly, and one per count, which follows slowly. Choices depend on ratios
    between counts only, so the first keeps a slower machine from looking like a dearer draft token.

    Start-up may have been disturbed itself. So what it measured counts for nothing against a step
    that was seen: `known` tells how many were, `at_most` what a larger one may take if the table
    is wrong.

    largest  nodes of the largest step that was seen; 0: none was
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured, self.largest = measured, 0
        # Corrections have counts between and beyond those of the table.
        powers = (1 << power for power in range(LARGEST.bit_length()))
        self._counts = tuple(sorted({*measured.nodes, *powers}))
        self._line: list[float] = measured.verify(np.array(self._counts)).tolist()
        # Logarithms of the corrections: of all counts, and of each in _counts.
        self._level, self._steps = 0.0, 0
        self._each = [0.0] * len(self._counts)
        self._seen = [0.0] * len(self._counts)

    def many(self, nodes: AnyArray, cached: AnyArray) -> AnyArray:
        """Milliseconds of a step, drafting not counted; the arguments' shape.

        nodes   known tokens and draft tokens
        cached  cached tokens that they see, summed over the nodes
        """
        costs = self.measured
        base = costs.verify(nodes) + costs.attend_ms * cached / 1000.0
        ms: AnyArray = np.exp(self._level + np.interp(nodes, self._counts, self._each)) * base
        return ms

    def one(self, nodes: int, cached: int) -> float:
        """`many` of one step, in microseconds instead of many: it is asked in every step."""
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
        new = self._steps >= MIN_REPEATS and self.known(nodes) < MIN_REPEATS
        self._steps += 1
        self.largest = max(self.largest, nodes)
        if self._steps > 1:
            error = min(log(NEW_OUTLIER if new else OUTLIER_FACTOR), error)
        # The first step sets the level: 1/1, 1/2, 1/3, ... is a mean of the first few. What a
        # count says that was not seen before is no news of the machine.
        follow = 0.0 if new else max(FOLLOW, 1.0 / self._steps)
        self._level += follow * error
        error *= 1.0 - follow
        below, above, fraction = self._between(nodes)
        # The counts on both sides share what was learnt: the nearer one more, and the one that is
        # known less (variances 1 / seen, as in a Kalman filter).
        sides = [(count, w) for count, w in ((above, fraction), (below, 1.0 - fraction)) if w]
        doubts = [w / max(self._seen[count], UNSEEN) for count, w in sides]
        whole = 1.0 + sum(w * doubt for (_, w), doubt in zip(sides, doubts, strict=True))
        for (count, weight), doubt in zip(sides, doubts, strict=True):
            self._each[count] += max((1.0 - DECAY) * weight, doubt / whole) * error
            self._seen[count] += weight

    def describe(self) -> dict[str, float]:
        """Milliseconds by number of nodes, as believed now, with little context."""
        return {str(count): round(self.one(count, 0), 3) for count in self.measured.nodes}

    @property
    def pace(self) -> float:
        """How much slower steps are now than they were measured; 1 = as measured."""
        return exp(self._level)
