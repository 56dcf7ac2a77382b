"""Confidence intervals of a ratio that was measured in pairs of adjacent runs."""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

CONFIDENCE = 0.95
"""Probability with which an interval contains the true median."""


class Interval(NamedTuple):
    """A sample median and a confidence interval of the true one.

    confidence  of the interval; below CONFIDENCE if there are too few values
    """

    middle: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of n independent values and the interval of the sign test, of at least
    CONFIDENCE if there are enough values; the result has its exact confidence.

    values  for example ratios, one per pair of runs

    The interval holds for any distribution, and a slow period of the machine that affects a few
    pairs moves it by a few ranks at most: the k-th smallest and the k-th largest value enclose the
    true median with probability 1 - 2 P[Binomial(n, 1/2) < k]. Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered, count = sorted(values), len(values)
    outside, rank = 2.0 ** (1 - count), 1
    while rank < count // 2:
        more = outside + 2.0 ** (1 - count) * comb(count, rank)
        if more > 1.0 - CONFIDENCE:
            break
        outside, rank = more, rank + 1
    low, high = ordered[rank - 1], ordered[count - rank]
    return Interval(median(ordered), low, high, max(0.0, 1.0 - outside))
