"""How sure a ratio is that was measured in pairs, one side right beside the other."""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

CONFIDENCE = 0.95
"""How often an interval shall hold the true median."""


class Interval(NamedTuple):
    """A median and where the true one lies.

    confidence  how often such an interval holds the true median; below CONFIDENCE where there are
                too few values
    """

    middle: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of n independent values, and the sign test's interval between two of them,
    of at least CONFIDENCE if there are enough values; the result has its actual confidence.

    values  ratios, say, one per pair of runs

    It holds whatever their distribution, and a slow moment of the machine that spoils a few pairs
    moves it by a few ranks at most: the k-th smallest and the k-th largest value hold the true
    median between them with probability 1 - 2 P[Binomial(n, 1/2) < k]. Raises ValueError if
    there are none.
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
