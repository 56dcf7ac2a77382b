from types import SimpleNamespace

import numpy as np

from forerun.drafters.map_coverage import ENOUGH, MapCoverage


def step(*rows):
    """A step's outcome: what each row emitted."""
    width = max(map(len, rows))
    return SimpleNamespace(tokens=np.array([[*row, *[-1] * (width - len(row))] for row in rows]))


def test_tokens_outside_a_map_are_counted_and_said_once(caplog):
    coverage = MapCoverage(np.array([1, 2, 5], np.int32), 10)
    assert coverage.describe() == {"size": 3, "left_out": 0.0}
    coverage.count(step([1, 2, 9], [5], []))
    assert coverage.describe() == {"size": 3, "left_out": 0.25} and not caplog.records
    for _ in range(2 * ENOUGH):
        coverage.count(step([9]))
    (said,) = caplog.records
    assert "outside the draft's vocabulary of 3" in said.getMessage()


def test_a_map_that_holds_what_is_written_says_nothing(caplog):
    coverage = MapCoverage(np.array([1, 2], np.int32), 10)
    for _ in range(2 * ENOUGH):
        coverage.count(step([1], [2]))
    assert coverage.describe()["left_out"] == 0 and not caplog.records
