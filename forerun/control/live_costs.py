"""What a step costs now: what start-up measured, corrected by every step that is run since."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

import numpy as np

from forerun.control.constants import DECAY, FOLLOW, MIN_REPEATS, OUTLIER
from forerun.control.step_costs import StepCosts

LARGEST = 14
"""Powers of two of nodes up to which corrections have counts of their own: no step has more."""


Kind = tuple[int, int, bool]
"""Plain steps that take about the same: powers of two of rows and of cached tokens of a row, and
whether they begin before the one before them is looked at.
"""


@dataclass(slots=True)
class _Correction:
    """Logarithm of what steps took over what the table says; of how many."""

    value: float = 0.0
    seen: float = 0.0

    def learn(self, error: float, weight: float = 1.0) -> None:
        """A mean of the last ones, a plain one at first."""
        self.seen += weight
        self.value += weight * max(1.0 - DECAY, 1.0 / max(self.seen, 1.0)) * error


class LiveCosts:
    """Measured costs that follow the machine: a step of the batch without draft tokens, and how
    many times as long one with draft tokens takes.

    What start-up says is corrected by counts of nodes, whoever's they are; beside that, plain steps
    are corrected by kind. All steps teach how fast the machine is now, which has no part in what a
    draft token costs: a slower machine makes none dearer.

    steps  that were seen
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured, self.steps, self._pace = measured, 0, 0.0
        powers = (1 << power for power in range(LARGEST))
        self._counts = tuple(sorted({*measured.nodes, *powers}))
        self._line: list[float] = measured.verify(np.array(self._counts)).tolist()
        self._each, self._largest = [_Correction() for _ in self._counts], 0
        # By kind; and of so many rows the one that was learned last.
        self._plain: dict[Kind | tuple[int, bool], _Correction] = {}

    def plain(self, rows: int, cached: int, carried: bool) -> float:
        """Milliseconds of a plain step that is carried, or of one that is not."""
        kind = _kind(rows, cached, carried)
        correction = self._plain.get(kind) or self._plain.get((kind[0], carried))
        error = self._pace + (correction.value if correction else 0.0)
        if not carried:
            error += self._error(rows)
        return exp(error) * self._told(rows, cached)

    def seen(self, rows: int, carried: bool) -> float:
        """How many plain steps of about so many rows were seen, carried or not."""
        correction = self._plain.get(((rows - 1).bit_length(), carried))
        return correction.seen if correction else 0.0

    def carries(self, rows: int) -> bool:
        """Whether plain steps of about so many rows are carried."""
        return self.seen(rows, True) > 0.0

    def late(self, rows: int, cached: int) -> float:
        """How many times as long a plain step takes that is not carried, where others are."""
        if not (self.carries(rows) and self.seen(rows, False)):
            return 1.0
        return self.plain(rows, cached, False) / self.plain(rows, cached, True)

    def ratio(self, rows: int, nodes: int, cached: int) -> float:
        """Plain steps that a step of so many nodes takes, drafting not counted; cached: what the
        rows see without draft tokens.
        """
        if nodes == rows:
            return 1.0
        told = self._told(nodes, cached * nodes // rows) / self._told(rows, cached)
        return exp(self._error(nodes) - self._error(rows)) * told

    def at_most(self, rows: int, nodes: int, cached: int, believed: float) -> float:
        """Plain steps that it may take if the table is wrong: what is `believed`, and beyond the
        largest step that was seen at least in proportion to that.
        """
        seen = max(self._largest, rows)
        if not self._largest or nodes <= seen:
            return believed
        return max(believed, self.ratio(rows, seen, cached) * nodes / seen)

    def price(self, rows: int, most: int, cached: int) -> float:
        """What a draft token costs at least, in tokens of plain decoding, beside these rows.

        Times grow in straight lines between measured counts of nodes: it is cheapest at one of
        these, or as the first or the last of so many nodes.
        """
        counts = {rows + 1, most, *(n for n in self.measured.nodes if rows < n < most)}
        return rows * min((self.ratio(rows, n, cached) - 1.0) / (n - rows) for n in counts)

    def _told(self, nodes: int, cached: int) -> float:
        below, above, fraction = self._between(nodes)
        one, two = self._line[below], self._line[above]
        return one + fraction * (two - one) + self.measured.attend_ms * cached / 1000.0

    def _between(self, nodes: int) -> tuple[int, int, float]:
        """The counts around `nodes`, by index, and how far it is from one to the other."""
        counts = self._counts
        above = min(bisect_left(counts, nodes), len(counts) - 1)
        below = max(above - 1, 0) if nodes < counts[above] else above
        fraction = (
            (nodes - counts[below]) / (counts[above] - counts[below]) if above > below else 1.0
        )
        return below, above, fraction

    def learn_plain(self, rows: int, cached: int, carried: bool, ms: float) -> None:
        """A plain step took so long."""
        kind = _kind(rows, cached, carried)
        last = self._plain.get((kind[0], carried)) or _Correction()
        if kind not in self._plain:
            # What another context says counts for a few.
            self._plain[kind] = _Correction(last.value, min(last.seen, MIN_REPEATS))
        correction = self._plain[kind[0], carried] = self._plain[kind]
        error = self._follow(ms / self.plain(rows, cached, carried), correction.seen < MIN_REPEATS)
        if not carried:
            before = self._error(rows)
            self._learn_at(rows, error)
            error -= self._error(rows) - before
        self._largest = max(self._largest, rows)
        correction.learn(error)

    def learn(self, rows: int, nodes: int, cached: int, ratio: float) -> None:
        """A step with draft tokens took so many plain steps."""
        below, above, fraction = self._between(nodes)
        seen = self._each[below].seen, self._each[above].seen
        self._largest = max(nodes, self._largest)
        over = ratio / self.ratio(rows, nodes, cached)
        # What a count says that was not seen before is no news of the machine.
        new = (1.0 - fraction) * seen[0] + fraction * seen[1] < MIN_REPEATS
        error = min(log(max(over, 1e-6)), log(2.0 * OUTLIER)) if new else self._follow(over)
        self._learn_at(nodes, error)

    def _error(self, nodes: int) -> float:
        """Logarithm of the correction of so many nodes."""
        below, above, fraction = self._between(nodes)
        one, two = self._each[below].value, self._each[above].value
        return one + fraction * (two - one)

    def _learn_at(self, nodes: int, error: float) -> None:
        """The nearer count learns more: a lucky step of 65 nodes would make 128 look cheap."""
        below, above, fraction = self._between(nodes)
        self._each[above].learn(error, fraction)
        if below < above:
            self._each[below].learn(error, 1.0 - fraction)

    def _follow(self, over: float, new: bool = False) -> float:
        """A step took `over` times what was believed: part of that is the machine's, the rest (a
        logarithm) is given back. The first step sets the pace.
        """
        self.steps += 1
        error = log(max(over, 1e-6))
        if self.steps > 1:
            error = min(error, log(2.0 * OUTLIER if new else OUTLIER))
        pace = max(FOLLOW, 1.0 / self.steps) * error
        self._pace += pace
        return error - pace

    def describe(self) -> dict[str, float]:
        """Milliseconds of one row by number of nodes, as believed now, with little context."""
        plain = self.plain(1, 0, self.carries(1))
        return {str(n): round(plain * self.ratio(1, n, 0), 3) for n in self.measured.nodes}

    @property
    def pace(self) -> float:
        """How much slower steps are now than they were measured; 1 = as measured."""
        return exp(self._pace)


def _kind(rows: int, cached: int, carried: bool) -> Kind:
    return ((rows - 1).bit_length(), (cached // rows).bit_length(), carried)
