"""The interval around a median of ratios."""

import numpy as np
import pytest

from forerun.measure.paired import median_interval


@pytest.mark.parametrize(
    ("count", "ranks", "confidence"),
    [(1, (1, 1), 0.0), (3, (1, 3), 0.75), (6, (1, 6), 0.96875), (15, (4, 12), 0.96484375),
     (20, (6, 15), 0.958610534667969), (25, (8, 18), 0.956714332103729)],
)  # fmt: skip
def test_ranks_are_those_of_the_tables(count, ranks, confidence):
    values = [float(value) for value in range(count, 0, -1)]
    found = median_interval(values)
    assert (found.low, found.high) == ranks and found.middle == (count + 1) / 2
    assert found.confidence == pytest.approx(confidence)


def test_it_holds_the_median_as_often_as_it_says():
    random = np.random.default_rng(1)
    draws = random.lognormal(0.02, 0.1, (4000, 15))
    held = [low <= np.exp(0.02) <= high for _, low, high, _ in map(median_interval, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.965, abs=0.012)


def test_a_slow_moment_does_not_move_it_far():
    calm = [1.0 + index / 1000 for index in range(15)]
    spoilt = [*calm[:13], 0.2, 9.0]
    assert median_interval(spoilt).low >= 1.0 and median_interval(spoilt).high <= 1.014


def test_nothing_has_no_median():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
