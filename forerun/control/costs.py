"""What a step costs now: what start-up measured, corrected by every step that is run since."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import numpy as np

from forerun.control.constants import (
    CREDIT,
    DECAY,
    FOLLOW,
    MIN_REPEATS,
    OUTLIER,
    PLAIN_EVERY,
    RENEW,
)
from forerun.control.step_costs import StepCosts

LARGEST = 14
"""Powers of two of nodes that have places of their own in the table: no step has more."""


@dataclass(slots=True)
class Mean:
    """Of the last observations, a plain one at first; of how many, and when the last one was."""

    value: float = 0.0
    seen: float = 0.0
    last: int = 0

    def learn(self, error: float, weight: float = 1.0) -> None:
        """The next observation is so far from the mean."""
        self.seen += weight
        self.value += weight * max(1.0 - DECAY, 1.0 / max(self.seen, 1.0)) * error


_UNSEEN = Mean()


class Curve(NamedTuple):
    """What draft tokens cost beside so many rows, in plain steps.

    made   how many steps were seen then
    price, hopeful  see `LiveCosts.price`
    steps  see `LiveCosts.longer`; empty until it is asked for
    """

    made: int
    price: float
    hopeful: float
    steps: list[tuple[float, float]]


class _Between(dict[int, tuple[int, int, float]]):
    """By nodes, made when they are asked for first: the counts around them, by index, and how far
    it is from one to the other.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = counts

    def __missing__(self, nodes: int) -> tuple[int, int, float]:
        counts = self._counts
        above = min(bisect_left(counts, nodes), len(counts) - 1)
        below = above if above == 0 or nodes >= counts[above] else above - 1
        way = 1.0 if below == above else (nodes - counts[below]) / (counts[above] - counts[below])
        self[nodes] = below, above, way
        return self[nodes]


class LiveCosts:
    """Measured costs that follow the machine: a step of the batch without draft tokens, and how
    many times as long one with draft tokens takes.

    What start-up says is corrected by counts of nodes, whoever's they are; beside that, plain steps
    are corrected by rows, context and whether they are carried. All steps teach how fast the
    machine is now, which has no part in what a draft token costs: a slower machine makes none
    dearer. A count that no step had for long is believed to cost less and less more than a plain
    step, and to lose less: what is believed too dear would never be tried, and never be known.

    steps  that were seen
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured, self.steps, self._pace = measured, 0, 0.0
        powers = (1 << power for power in range(LARGEST))
        self._counts = tuple(sorted({*measured.nodes, *powers}))
        self._between = _Between(self._counts)
        self._line: list[float] = measured.verify(np.array(self._counts)).tolist()
        self._each, self._largest = [Mean() for _ in self._counts], 0
        # By powers of two of rows, and of cached tokens of a row, and whether they are carried; of
        # so many rows the one that was learned last has no context.
        self._plain: dict[tuple[int, int | None, bool], Mean] = {}
        self._curves: dict[tuple[int, int], Curve] = {}  # By rows and nodes.

    def plain(self, rows: int, cached: int, carried: bool) -> float:
        """Milliseconds of a plain step that is carried, or of one that is not."""
        mean = self._plain.get(_kind(rows, cached, carried)) or self._last(rows, carried)
        error = self._pace + mean.value + (0.0 if carried else self._error(rows))
        return exp(error) * self._told(rows, cached)

    def _last(self, rows: int, carried: bool) -> Mean:
        return self._plain.get(((rows - 1).bit_length(), None, carried), _UNSEEN)

    def seen(self, rows: int, carried: bool) -> float:
        """How many plain steps of about so many rows were seen, carried or not."""
        return self._last(rows, carried).seen

    def late(self, rows: int, cached: int) -> float:
        """How many times as long a plain step takes that is not carried, where others are."""
        if not (self.seen(rows, True) and self.seen(rows, False)):
            return 1.0
        return self.plain(rows, cached, False) / self.plain(rows, cached, True)

    def ratio(self, rows: int, nodes: int, cached: int, hopeful: bool = False) -> float:
        """Plain steps that a step of so many nodes takes, drafting not counted; cached: what the
        rows see without draft tokens; hopeful: the less, the longer no step had so many.
        """
        if nodes == rows:
            return 1.0
        told = self._told(nodes, cached * nodes // rows) / self._told(rows, cached)
        ratio = exp(self._error(nodes) - self._error(rows)) * told
        if not hopeful:
            return ratio
        below, above, fraction = self._between[nodes]
        one, two = self._trust(self._each[below]), self._trust(self._each[above])
        return 1.0 + (ratio - 1.0) * (one + fraction * (two - one))

    def _trust(self, mean: Mean) -> float:
        """How far to believe that a count is so dear: the longer, the more it was seen."""
        return min(1.0, PLAIN_EVERY * max(1.0, mean.seen) / max(self.steps - mean.last, 1))

    def at_most(self, rows: int, nodes: int, cached: int) -> float:
        """Plain steps that it may take if the table is wrong, hopefully: beyond the largest step
        that was seen at least in proportion to that.
        """
        ratio, seen = self.ratio(rows, nodes, cached, hopeful=True), max(self._largest, rows)
        if not self._largest or nodes <= seen:
            return ratio
        return max(ratio, self.ratio(rows, seen, cached) * nodes / seen)

    def price(self, rows: int, most: int, cached: int, hopeful: bool = False) -> float:
        """What a draft token costs at least, in tokens of plain decoding, beside these rows.

        Times grow in straight lines between measured counts of nodes: it is cheapest at one of
        these, or as the first or the last of so many nodes.
        """
        counts = {rows + 1, most, *(n for n in self.measured.nodes if rows < n < most)}
        return rows * min((self.ratio(rows, n, cached, hopeful) - 1.0) / (n - rows) for n in counts)

    def curve(self, rows: int, most: int, cached: int) -> Curve:
        """The prices of up to `most` nodes, as they were believed RENEW steps ago at most."""
        curve = self._curves.get((rows, most))
        if curve is None or self.steps - curve.made >= min(RENEW, 1 + self.steps // RENEW):
            prices = self.price(rows, most, cached), self.price(rows, most, cached, hopeful=True)
            curve = self._curves[rows, most] = Curve(self.steps, *prices, [])
        return curve

    def longer(self, rows: int, most: int, cached: int) -> list[tuple[float, float]]:
        """How much longer than a plain step one with 1, 2, ... draft tokens takes, of every row
        where they are padded, hopefully and at most, as far as that is CREDIT; as old as `curve`.
        """
        steps, each = self.curve(rows, most, cached).steps, rows if self.measured.padded else 1
        for nodes in range(rows + each, 0 if steps else most + 1, each):
            longest = self.at_most(rows, nodes, cached) - 1.0
            if longest > CREDIT:
                break
            steps.append((self.ratio(rows, nodes, cached, hopeful=True) - 1.0, longest))
        return steps

    def _told(self, nodes: int, cached: int) -> float:
        below, above, fraction = self._between[nodes]
        one, two = self._line[below], self._line[above]
        return one + fraction * (two - one) + self.measured.attend_ms * cached / 1000.0

    def learn_plain(self, rows: int, cached: int, carried: bool, ms: float) -> None:
        """A plain step took so long."""
        kind, last = _kind(rows, cached, carried), self._last(rows, carried)
        if kind not in self._plain:
            # What another context says counts for a few.
            self._plain[kind] = Mean(last.value, min(last.seen, MIN_REPEATS))
        mean = self._plain[kind[0], None, carried] = self._plain[kind]
        error = self.follow(ms / self.plain(rows, cached, carried), mean.seen)
        if not carried:
            before = self._error(rows)
            self._learn_at(rows, error)
            error -= self._error(rows) - before
        mean.learn(error)

    def learn(self, rows: int, nodes: int, cached: int, ratio: float) -> None:
        """A step with draft tokens took so many plain steps."""
        below, above, fraction = self._between[nodes]
        seen = (1.0 - fraction) * self._each[below].seen + fraction * self._each[above].seen
        self._learn_at(nodes, self.follow(ratio / self.ratio(rows, nodes, cached), seen))

    def _error(self, nodes: int) -> float:
        """Logarithm of the correction of so many nodes."""
        below, above, fraction = self._between[nodes]
        one, two = self._each[below].value, self._each[above].value
        return one + fraction * (two - one)

    def _learn_at(self, nodes: int, error: float) -> None:
        """The nearer count learns more: a lucky step of 65 nodes would make 128 look cheap."""
        self._largest = max(self._largest, nodes)
        below, above, fraction = self._between[nodes]
        for place, weight in ((above, fraction), (below, 1.0 - fraction)):
            self._each[place].learn(error, weight)
            if weight >= 0.5:
                self._each[place].last = self.steps

    def follow(self, over: float, seen: float = MIN_REPEATS) -> float:
        """A step took `over` times what was believed: part of that is the machine's, the rest (a
        logarithm) is given back. The first step sets the pace; then a step of a kind that was
        hardly `seen` is no news of the machine.
        """
        self.steps += 1
        error, known = log(max(over, 1e-6)), seen >= MIN_REPEATS
        if self.steps > 1:
            error = min(error, log(OUTLIER if known else 2.0 * OUTLIER))
        pace = max(FOLLOW, 1.0 / self.steps) * error if known or self.steps == 1 else 0.0
        self._pace += pace
        return error - pace

    def describe(self) -> dict[str, float]:
        """Milliseconds of one row by number of nodes, as believed now, with little context."""
        plain = self.plain(1, 0, self.seen(1, True) > 0.0)
        return {str(n): round(plain * self.ratio(1, n, 0), 3) for n in self.measured.nodes}

    @property
    def pace(self) -> float:
        """How much slower steps are now than they were measured; 1 = as measured."""
        return exp(self._pace)


def _kind(rows: int, cached: int, carried: bool) -> tuple[int, int | None, bool]:
    return ((rows - 1).bit_length(), (cached // rows).bit_length(), carried)
