"""The first steps of an engine: whatever start-up measured, they are not slower than plain ones."""

import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_REPEATS
from forerun.control.costs import LiveCosts, StepCosts
from forerun.control.reasons import PLAIN
from tests.control.steps import FREE, Text, arrays, report_of
from tests.covering import every, some_of, values

COUNTS = (1, 2, 4, 8, 16, 32, 64)
CPU = StepCosts(COUNTS, (4.0, 4.4, 5.2, 10.1, 20.1, 38.3, 78.8))
"""What steps take: two cores, the default model."""
MEASURED = {
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


def new(costs, rows):
    return AdaptivePolicy(costs, 8, 8, FREE)


@pytest.mark.parametrize(
    ("costs", "rows", "honesty"), some_of(every(MEASURED, [4, 16], [0.2, 0.6, 1.0]), values)
)
def test_a_new_engine_is_not_slower_than_plain(costs, rows, honesty):
    text = Text(CPU, rows, honesty).run(new(MEASURED[costs], rows), STEPS)
    assert text.over_plain() >= 0.97


@pytest.mark.parametrize("costs", sorted(set(MEASURED) - {"nodes as dear as tokens"}))
def test_a_new_engine_gains_at_one_stream(costs):
    text = Text(CPU, 1, 1.0).run(new(MEASURED[costs], 1), STEPS)
    assert text.over_plain() >= 1.1


def test_the_first_steps_of_every_number_of_rows_are_plain():
    policy = new(MEASURED["small steps slow"], 4)
    for rows in (4, 2):
        for _ in range(MIN_REPEATS):
            assert policy.decide(*arrays(rows)).reason == PLAIN
            policy.observe(report_of([[1]] * rows, [0] * rows, float(CPU.verify(rows))))
        assert policy.decide(*arrays(rows)).reason != PLAIN
        plain = policy.account.costs.plain(rows, 64 * rows, False)
        assert plain == pytest.approx(float(CPU.verify(rows)), rel=0.01)


def test_a_step_larger_than_those_seen_may_take_as_long_as_its_nodes():
    live = LiveCosts(MEASURED["nodes nearly free"])
    assert live.worst_case(1, 16, 0) == live.relative_cost(1, 16, 0), (
        "nothing was seen: what is believed"
    )
    live.learn_plain(1, 0, False, 4.0)
    assert live.worst_case(1, 16, 0) == 16.0
    for _ in range(MIN_REPEATS):
        live.learn(1, 4, 0, 1.3)
    assert live.relative_cost(1, 4, 0) == pytest.approx(1.3)
    assert live.worst_case(1, 8, 0) == pytest.approx(2 * 1.3)
    live.learn(1, 8, 0, 2.5)
    believed = live.relative_cost(1, 8, 0)
    assert believed == pytest.approx(2.5, rel=0.01)
    assert live.worst_case(1, 8, 0) == believed
    assert live.relative_cost(1, 4, 0) == pytest.approx(
        1.3
    )  # Of steps of 4 nodes that said nothing.


def test_a_lucky_step_says_little_of_counts_far_away():
    """65 nodes lie close to 64; what they say of 128 was once eleven times as much."""
    live = LiveCosts(CPU)
    for _ in range(5):
        live.learn(32, 64, 0, live.relative_cost(32, 64, 0))
    before = live.relative_cost(32, 128, 0)
    live.learn(32, 65, 0, 0.97 * live.relative_cost(32, 65, 0))
    assert live.relative_cost(32, 128, 0) == pytest.approx(before, rel=0.05)


def test_what_plain_steps_take_is_known_by_rows_and_context():
    """Start-up says nothing of long contexts here; plain steps do, and long ones say nothing of
    short ones.
    """
    live = LiveCosts(CPU)
    for cached, ms in ((64, 4.0), (4096, 9.0)) * 20:
        live.learn_plain(1, cached, False, ms)
    assert live.plain(1, 64, False) == pytest.approx(4.0, rel=0.15)
    assert live.plain(1, 4096, False) == pytest.approx(9.0, rel=0.15)
    assert live.plain(1, 8191, False) == live.plain(1, 4096, False)


@pytest.mark.parametrize("first", [False, True])
def test_the_first_step_that_is_carried_is_no_news_of_the_machine(first):
    """Nor the first that is not: a plain step takes half as long where it begins early."""
    live, took = LiveCosts(CPU), {True: 2.0, False: 4.0}
    for carried in (first, *[not first] * 5):
        live.learn_plain(1, 64, carried, took[carried])
    assert live.non_overlapped_slowdown(1, 64) == pytest.approx(2.0)
    assert live.plain(1, 64, True) == pytest.approx(2.0)
