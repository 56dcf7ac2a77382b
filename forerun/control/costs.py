"""Estimates what a step costs now: the start-up measurement, corrected by every step since."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import exp, inf, log
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
    RETRY,
)
from forerun.control.step_costs import StepCosts

LARGEST = 14
"""Number of powers of two, from 1, that have an entry in the table: no step has more nodes than the
largest.
"""


@dataclass(slots=True)
class Mean:
    """A running mean: arithmetic at first, exponential (DECAY) later.

    seen  weight of all observations, in observations
    last  number of the newest step observed
    """

    value: float = 0.0
    seen: float = 0.0
    last: int = 0

    def learn(self, error: float, weight: float = 1.0) -> None:
        """Move the mean towards the next observation, which differs from it by `error` (observation
        minus mean) and counts as `weight` observations.
        """
        self.seen += weight
        self.value += weight * max(1.0 - DECAY, 1.0 / max(self.seen, 1.0)) * error


_UNSEEN = Mean()


class Curve(NamedTuple):
    """The costs of draft tokens in steps of some number of rows.

    made   the step count at which it was computed
    min_mean_cost, min_marginal_cost  see `LiveCosts`
    added  see `LiveCosts.added_steps`; empty until first needed
    """

    made: int
    min_mean_cost: float
    min_marginal_cost: float
    added: list[tuple[float, float]]


class LiveCosts:
    """Measured costs that follow the machine: milliseconds of a plain step of the batch, and how
    many times as long a step with draft tokens takes.

    The start-up measurement is corrected per count of nodes, in rows of any kind; plain steps also
    by rows, context and whether they are carried. All steps correct the machine's pace, which does
    not affect the cost of a draft token, in plain steps. If no step had a count for long, its
    estimated extra cost and loss shrink step by step: otherwise a count that was once overestimated
    would never be tried again, and the estimate never corrected.

    steps         number of steps observed
    log_pace      natural logarithm of `pace`
    counts        numbers of nodes that have a correction, ascending
    corrections   of each of `counts`: mean error of the measured ratio, as a natural logarithm
    largest_seen  most nodes of an observed step
    plain_means   mean error of plain steps, as a natural logarithm, by powers of two of rows and of
                  cached tokens per row, and whether they are carried; under the context
                  None, the newest mean of such rows
    """

    def __init__(self, measured: StepCosts) -> None:
        self.measured, self.steps, self.log_pace = measured, 0, 0.0
        powers = (1 << power for power in range(LARGEST))
        self.counts = tuple(sorted({*measured.nodes, *powers}))
        self._neighbours = cache(partial(_neighbours, self.counts))
        self._verify_ms: list[float] = measured.verify(np.array(self.counts)).tolist()
        self.corrections, self.largest_seen = [Mean() for _ in self.counts], 0
        # Kinds of plain steps whose last one was slow.
        self._slow: set[tuple[int, int | None, bool]] = set()
        self.plain_means: dict[tuple[int, int | None, bool], Mean] = {}
        self._curves: dict[tuple[int, int], Curve] = {}  # By rows and nodes.

    def plain(self, rows: int, cached: int, carried: bool) -> float:
        """Return the expected milliseconds of a plain step, carried or not.

        rows    sequences of the step
        cached  cached tokens of all rows together
        """
        mean = self.plain_means.get(_kind(rows, cached, carried)) or self._last(rows, carried)
        error = self.log_pace + mean.value + (0.0 if carried else self._error(rows))
        return exp(error) * self._measured_ms(rows, cached)

    def _last(self, rows: int, carried: bool) -> Mean:
        return self.plain_means.get(((rows - 1).bit_length(), None, carried), _UNSEEN)

    def seen(self, rows: int, carried: bool) -> float:
        """Return the weight of all observed plain steps of about `rows` rows, carried or not, in
        steps.
        """
        return self._last(rows, carried).seen

    def non_overlapped_slowdown(self, rows: int, cached: int) -> float:
        """Return the time of a plain step that does not overlap, in plain steps that do; 1 until
        both were observed.
        """
        if not (self.seen(rows, True) and self.seen(rows, False)):
            return 1.0
        return self.plain(rows, cached, False) / self.plain(rows, cached, True)

    def relative_cost(self, rows: int, nodes: int, cached: int, optimistic: bool = False) -> float:
        """Return the time of a step of `nodes` nodes, in plain steps, without drafting.

        cached      cached tokens that the rows see without draft tokens
        optimistic  shrink the extra cost, the more so the longer no step had this many nodes
        """
        if nodes == rows:
            return 1.0
        measured = self._measured_ms(nodes, cached * nodes // rows) / self._measured_ms(
            rows, cached
        )
        upper_bound = self.upper_bound(rows, nodes)
        ratio = exp(self._error(nodes) - self._error(rows)) * min(measured, upper_bound)
        ratio = max(1.0, min(ratio, upper_bound))
        if not optimistic:
            return ratio
        below, above, fraction = self._neighbours(nodes)
        one, two = (self._confidence(self.corrections[place]) for place in (below, above))
        return 1.0 + (ratio - 1.0) * (one + fraction * (two - one))

    def upper_bound(self, rows: int, nodes: int) -> float:
        """Return the longest time of a step with `nodes` nodes, in plain steps: a node never takes
        longer than a step, so a longer one was interrupted.
        """
        return inf if self.measured.padded else nodes / rows

    def _confidence(self, mean: Mean) -> float:
        """Return how far to trust the extra cost of a count of nodes, 0 to 1. The trust lasts for
        more steps, the more often the count was observed.
        """
        known = mean.seen >= MIN_REPEATS
        steps = PLAIN_EVERY * mean.seen if known else RETRY * (0.5 + mean.seen)
        return min(1.0, steps / max(self.steps - mean.last, 1))

    def worst_case(self, rows: int, nodes: int, cached: int) -> float:
        """Return an upper estimate of a step's time, in plain steps, for the case that the
        optimistic ratio is wrong: beyond the largest observed step, at least in proportion to its
        time.
        """
        ratio = self.relative_cost(rows, nodes, cached, optimistic=True)
        seen = max(self.largest_seen, rows)
        if not self.largest_seen or nodes <= seen:
            return ratio
        return max(ratio, self.relative_cost(rows, seen, cached) * nodes / seen)

    def min_mean_cost(self, rows: int, max_nodes: int, cached: int) -> float:
        """Return the least mean cost of draft tokens beside these rows, in tokens of plain
        decoding: if it is 1, none can pay.

        Times are linear between measured counts of nodes, so the minimum is at one of these counts,
        or at the first or last node.
        """
        counts = self._ends(rows, max_nodes)
        return rows * min((self.relative_cost(rows, n, cached) - 1.0) / (n - rows) for n in counts)

    def min_marginal_cost(self, rows: int, max_nodes: int, cached: int) -> float:
        """Return the least cost of a further draft token, in tokens of plain decoding: a draft
        token of a lower probability never pays. Where kernels work in fours, the fifth to eighth
        node cost less than those before them, and less than the mean.
        """
        counts = [rows, *self._ends(rows, max_nodes)]
        ratios = [self.relative_cost(rows, n, cached, optimistic=True) for n in counts]
        steps = pairwise(zip(counts, ratios, strict=True))
        return rows * max(0.0, min((b - a) / (m - n) for (n, a), (m, b) in steps))

    def _ends(self, rows: int, max_nodes: int) -> list[int]:
        """Return the counts of nodes above `rows` between which times are linear, ascending."""
        return sorted(
            {rows + 1, max_nodes, *(n for n in self.measured.nodes if rows < n < max_nodes)}
        )

    def curve(self, rows: int, max_nodes: int, cached: int) -> Curve:
        """Return the costs of up to `max_nodes` nodes, computed at most RENEW steps ago."""
        curve = self._curves.get((rows, max_nodes))
        if curve is None or self.steps - curve.made >= min(RENEW, 1 + self.steps // RENEW):
            curve = self._curves[rows, max_nodes] = Curve(
                made=self.steps,
                min_mean_cost=self.min_mean_cost(rows, max_nodes, cached),
                min_marginal_cost=self.min_marginal_cost(rows, max_nodes, cached),
                added=[],
            )
        return curve

    def added_steps(self, rows: int, max_nodes: int, cached: int) -> list[tuple[float, float]]:
        """Return the (optimistic, worst-case) time that 1, 2, ... draft tokens, of every row if
        padded, add to a step, in plain steps, up to a loss of CREDIT. Computed with `curve`.
        """
        added, each = self.curve(rows, max_nodes, cached).added, rows if self.measured.padded else 1
        for nodes in range(rows + each, 0 if added else max_nodes + 1, each):
            longest = self.worst_case(rows, nodes, cached) - 1.0
            if longest > CREDIT:
                break
            added.append((self.relative_cost(rows, nodes, cached, optimistic=True) - 1.0, longest))
        return added

    def _measured_ms(self, nodes: int, cached: int) -> float:
        below, above, fraction = self._neighbours(nodes)
        one, two = self._verify_ms[below], self._verify_ms[above]
        return one + fraction * (two - one) + self.measured.attend_ms * cached / 1000.0

    def learn_plain(self, rows: int, cached: int, carried: bool, ms: float) -> None:
        """Update the estimates with a plain step of `rows` rows and `cached` cached positions that
        took `ms` milliseconds. carried: it began before the step before it was finished.
        """
        kind, last = _kind(rows, cached, carried), self._last(rows, carried)
        known = kind in self.plain_means
        if not known:
            # Start from the newest mean of another context, with a small weight.
            self.plain_means[kind] = Mean(last.value, min(last.seen, MIN_REPEATS))
        mean = self.plain_means[kind[0], None, carried] = self.plain_means[kind]
        ratio = ms / self.plain(rows, cached, carried)
        slow, again = ratio > OUTLIER, kind in self._slow
        self._slow = self._slow | {kind} if slow else self._slow - {kind}
        if slow and known and not again:
            ratio = 1.0  # It was interrupted, unless the next one is slow as well.
        elif known and ratio < 1.0 and self.steps < MIN_REPEATS:
            self.scale_pace(ratio)  # The fastest of the first ones sets the pace.
            ratio = 1.0
        error = self.update_pace(ratio, mean.seen)
        if not carried:
            believed = self._error(rows)
            self._learn_at(rows, error)
            error -= self._error(rows) - believed
        mean.learn(error)

    def learn(self, rows: int, nodes: int, cached: int, ratio: float) -> None:
        """Update the estimates with a step with draft tokens that took `ratio` plain steps."""
        ratio = min(ratio, self.upper_bound(rows, nodes))
        below, above, fraction = self._neighbours(nodes)
        seen = (1.0 - fraction) * self.corrections[below].seen + fraction * self.corrections[
            above
        ].seen
        self._learn_at(
            nodes, self.update_pace(ratio / self.relative_cost(rows, nodes, cached), seen)
        )

    def _error(self, nodes: int) -> float:
        """Return the correction for a number of nodes, as a natural logarithm."""
        below, above, fraction = self._neighbours(nodes)
        one, two = self.corrections[below].value, self.corrections[above].value
        return one + fraction * (two - one)

    def _learn_at(self, nodes: int, error: float) -> None:
        """Correct both neighbouring counts, the nearer one more: otherwise a fast step of 65 nodes
        would make 128 look cheap.
        """
        self.largest_seen = max(self.largest_seen, nodes)
        below, above, fraction = self._neighbours(nodes)
        for place, weight in ((above, fraction), (below, 1.0 - fraction)):
            self.corrections[place].learn(error, weight)
            if weight >= 0.5:
                self.corrections[place].last = self.steps

    def update_pace(self, ratio: float, seen: float = MIN_REPEATS) -> float:
        """Attribute a part of a step's error to the machine's pace and return the rest, a natural
        logarithm. The first step sets the pace; later, a step of a kind that was observed fewer
        than MIN_REPEATS times (`seen`) does not change it.

        ratio  the step's time over the expected time
        """
        self.steps += 1
        error, is_known = log(max(ratio, 1e-6)), seen >= MIN_REPEATS
        if self.steps > 1:
            error = min(error, log(OUTLIER if is_known else 2.0 * OUTLIER))
        pace = max(FOLLOW, 1.0 / self.steps) * error if is_known or self.steps == 1 else 0.0
        self.log_pace += pace
        return error - pace

    def scale_pace(self, ratio: float) -> None:
        """Multiply the time expected of every step by `ratio` (above 0): the machine's pace has
        changed, not the cost of draft tokens.
        """
        self.log_pace += log(ratio)

    def describe(self) -> dict[str, float]:
        """Return milliseconds of one row by number of nodes, as estimated now, with little
        context.
        """
        plain = self.plain(1, 0, self.seen(1, True) > 0.0)
        return {str(n): round(plain * self.relative_cost(1, n, 0), 3) for n in self.measured.nodes}

    @property
    def pace(self) -> float:
        """Factor by which steps are slower now than at start-up; 1 = equal."""
        return exp(self.log_pace)


def _kind(rows: int, cached: int, carried: bool) -> tuple[int, int | None, bool]:
    return ((rows - 1).bit_length(), (cached // rows).bit_length(), carried)


def _neighbours(counts: tuple[int, ...], nodes: int) -> tuple[int, int, float]:
    """Return the indices of the counts around a number of nodes, and how far it lies from the lower
    to the upper one, 0 to 1.
    """
    above = min(bisect_left(counts, nodes), len(counts) - 1)
    below = above if above == 0 or nodes >= counts[above] else above - 1
    span = counts[above] - counts[below]
    return below, above, (nodes - counts[below]) / span if span else 1.0
