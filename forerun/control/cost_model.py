"""What a step costs: measured at start-up, corrected by every step that is run since."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

import numpy as np

from forerun.control.constants import DECAY, FOLLOW, MIN_REPEATS, OUTLIER_FACTOR
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
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured = measured
        # Logarithms of the corrections: of all counts, and of each in measured.nodes.
        self._level, self._steps = 0.0, 0
        self._each = [0.0] * len(measured.nodes)
        self._seen = [float(MIN_REPEATS)] * len(measured.nodes)

    def many(self, nodes: AnyArray, cached: AnyArray) -> AnyArray:
        """Milliseconds of a step, drafting not counted; the arguments' shape.

        nodes   known tokens and draft tokens
        cached  cached tokens that they see, summed over the nodes
        """
        costs = self.measured
        base = costs.verify(nodes) + costs.attend_ms * cached / 1000.0
        ms: AnyArray = np.exp(self._level + np.interp(nodes, costs.nodes, self._each)) * base
        return ms

    def one(self, nodes: int, cached: int) -> float:
        """`many` of one step, in microseconds instead of many: it is asked in every step."""
        costs = self.measured
        below, above, fraction = self._between(nodes)
        line = costs.verify_ms[below] + fraction * (costs.verify_ms[above] - costs.verify_ms[below])
        if nodes > costs.nodes[-1]:
            last = costs.verify_ms[-1] - costs.verify_ms[-2]
            line += (nodes - costs.nodes[-1]) * last / (costs.nodes[-1] - costs.nodes[-2])
        each = self._each[below] + fraction * (self._each[above] - self._each[below])
        return exp(self._level + each) * (line + costs.attend_ms * cached / 1000.0)

    def _between(self, nodes: int) -> tuple[int, int, float]:
        """The measured counts around `nodes`, by index, and how far it is from one to the other."""
        counts = self.measured.nodes
        above = min(bisect_left(counts, nodes), len(counts) - 1)
        below = max(above - 1, 0) if nodes < counts[above] else above
        fraction = (
            (nodes - counts[below]) / (counts[above] - counts[below]) if above > below else 1.0
        )
        return below, above, fraction

    def learn(self, nodes: int, ms: float, believed: float) -> None:
        """A step of so many nodes, of which `one` says `believed`, took so long."""
        error = log(max(ms, 1e-6) / max(believed, 1e-6))
        self._steps += 1
        if self._steps > 1:
            error = min(log(OUTLIER_FACTOR), error)
        # The first step sets the level: 1/1, 1/2, 1/3, ... is a mean of the first few.
        follow = max(FOLLOW, 1.0 / self._steps)
        self._level += follow * error
        error *= 1.0 - follow
        below, above, fraction = self._between(nodes)
        # The measured counts on both sides share what was learnt, the nearer one more.
        for count, weight in ((above, fraction), (below, 1.0 - fraction)):
            self._seen[count] += weight
            self._each[count] += max(1.0 - DECAY, 1.0 / self._seen[count]) * weight * error

    def describe(self) -> dict[str, float]:
        """Milliseconds by number of nodes, as believed now, with little context."""
        return {str(count): round(self.one(count, 0), 3) for count in self.measured.nodes}

    @property
    def pace(self) -> float:
        """How much slower steps are now than they were measured; 1 = as measured."""
        return exp(self._level)
