"""The first steps of an engine: whatever start-up measured, they are not slower than plain ones."""

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_REPEATS
from forerun.control.cost_model import LiveCosts
from forerun.control.reasons import PLAIN
from forerun.control.step_costs import StepCosts
from tests.control.steps import FREE, Text, arrays, report_of

COUNTS = (1, 2, 4, 8, 16, 32, 64)
CPU = StepCosts(COUNTS, (4.0, 4.4, 5.2, 10.1, 20.1, 38.3, 78.8))
"""What steps take: two cores, the default model (docs/log.md)."""
TOLD = {
    "right": CPU,
    "nodes nearly free": StepCosts(COUNTS, (10.0, 10.1, 10.2, 10.5, 10.8, 11.2, 12.0)),
    "nodes as dear as tokens": StepCosts(COUNTS, tuple(4.0 * nodes for nodes in COUNTS)),
    # One of two threads was away while some sizes were timed, or measuring ended early.
    "small steps slow": StepCosts(COUNTS, (7.0, 7.7, 9.5, 10.1, 20.1, 38.3, 78.8)),
    "large steps slow": StepCosts(COUNTS, (4.0, 4.4, 5.2, 10.1, 38.0, 75.0, 150.0)),
    "ended early": StepCosts((1, 2, 4, 8), (4.0, 4.4, 9.0, 9.0)),
    "two sizes": StepCosts((1, 8), (9.0, 9.5)),
}
STEPS = 100


def new(told, rows):
    policy = AdaptivePolicy(told, 8, 8, FREE)
    for slot in range(rows):
        policy.open(slot)
    return policy


@pytest.mark.parametrize("honesty", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("told", TOLD)
def test_a_new_engine_is_not_slower_than_plain(told, rows, honesty):
    text = Text(CPU, rows, honesty).run(new(TOLD[told], rows), STEPS)
    assert text.over_plain() >= 0.97


@pytest.mark.parametrize("told", sorted(set(TOLD) - {"nodes as dear as tokens"}))
def test_a_new_engine_gains_at_one_stream(told):
    text = Text(CPU, 1, 1.0).run(new(TOLD[told], 1), STEPS)
    assert text.over_plain() >= 1.1


def test_the_first_steps_of_every_number_of_rows_are_plain():
    policy = new(TOLD["small steps slow"], 4)
    for rows in (4, 2):
        for _ in range(MIN_REPEATS):
            assert policy.budget(*arrays(rows)).reason == PLAIN
            policy.observe(report_of([[1]] * rows, [0] * rows, float(CPU.verify(rows))))
        assert policy.budget(*arrays(rows)).reason != PLAIN
        assert policy.account.costs.one(rows, 0) == pytest.approx(float(CPU.verify(rows)), rel=0.01)


def test_a_step_larger_than_those_seen_may_take_as_long_as_its_nodes():
    live = LiveCosts(TOLD["nodes nearly free"])
    assert live.at_most(16, 0, 1.0) == 1.0  # Nothing was seen: what is believed.
    for _ in range(MIN_REPEATS):
        live.learn(4, 5.2, live.one(4, 0))
    assert live.at_most(8, 0, live.one(8, 0)) == pytest.approx(2 * 5.2)
    live.learn(8, 10.1, live.one(8, 0))
    believed = live.one(8, 0)
    assert believed == pytest.approx(10.1, rel=0.01)
    assert live.at_most(8, 0, believed) == believed
    assert live.one(4, 0) == pytest.approx(5.2)  # Of steps of 4 nodes that said nothing.
    assert live.known(6) == pytest.approx(np.mean([live.known(4), live.known(8)]))


def test_a_lucky_step_says_little_of_counts_far_away():
    """65 nodes lie close to 64; what they say of 128 was once eleven times as much."""
    live = LiveCosts(CPU)
    for _ in range(5):
        live.learn(64, 78.8, live.one(64, 0))
    before = live.one(128, 0) / live.one(64, 0)
    live.learn(65, 0.97 * live.one(65, 0), live.one(65, 0))
    assert live.one(128, 0) / live.one(64, 0) == pytest.approx(before, rel=0.05)
