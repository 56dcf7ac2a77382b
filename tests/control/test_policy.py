"""A drafter that costs time: levels against brute force, and over simulated text."""

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy
from forerun.control.reasons import ON_LEVELS, WRONG
from forerun.control.step_costs import StepCosts
from tests.control.steps import report_of, seen, slots_of

FLAT = StepCosts((1, 8, 64, 256), (10.0, 10.5, 12.0, 20.0))
MIDDLE = StepCosts((1, 2, 4, 8, 16, 64), (6.1, 6.6, 7.6, 10.7, 19.2, 71.9))
STEEP = StepCosts((1, 2, 4, 8, 16, 64), (10.6, 16.1, 28.8, 54.8, 86.6, 312.0))
TABLES = {"flat": FLAT, "middle": MIDDLE, "steep": STEEP}


def opened(costs: StepCosts, rows: int, nodes: int = 4, depth: int = 4) -> AdaptivePolicy:
    policy = AdaptivePolicy(costs, nodes, depth)
    for slot in range(rows):
        policy.open(slot)
    return policy


def told(policy, budgets, accepted, counts=None, ms=None):
    """The policy hears what became of its budgets: `counts` draft tokens that the device made by
    itself, `accepted` of them right; `ms`, or what the table says.
    """
    counts = [budget.nodes for budget in budgets] if counts is None else counts
    costs = policy.guard.costs.measured
    nodes = len(budgets) + sum(counts)
    policy.observe(
        report_of(
            [[1] * (1 + right) for right in accepted],
            counts,
            float(costs.verify(np.array(nodes))) if ms is None else ms,
            draft_ms=costs.draft_ms * sum(counts),
            allowed=[budget.nodes for budget in budgets],
            carried=True,
        )
    )


class Simulation:
    """Rows whose level-by-level acceptance is a chance, and the clock of a cost table."""

    def __init__(self, costs, policy, rows=1, seed=0):
        self.costs, self.policy, self.rows = costs, policy, rows
        self.random = np.random.default_rng(seed)
        self.ms = self.tokens = 0.0
        self.nodes: list[int] = []

    def run(self, steps, chance, match=1.0, length=None):
        """`match`: how often the drafter finds anything; `length`: steps of a sequence."""
        for step in range(steps):
            if length and step % length == 0:
                for slot in range(self.rows):
                    self.policy.open(slot)
            budgets = self.policy.budgets(slots_of(self.rows), np.full(self.rows, 64, np.int32))
            draft_tokens = [b.nodes if self.random.random() < match else 0 for b in budgets]
            right = []
            for budget, count in zip(budgets, draft_tokens, strict=True):
                accepted = 0
                while accepted < min(budget.depth, count) and self.random.random() < chance:
                    accepted += 1
                right.append(accepted)
            self.tokens += len(right) + sum(right)
            told(self.policy, budgets, right, draft_tokens)
            self.nodes += draft_tokens
            self.ms += float(self.costs.verify(self.rows + sum(draft_tokens)))
            self.ms += self.costs.draft_ms * sum(draft_tokens)
        return self

    @property
    def speed(self):
        return self.tokens / self.ms


def plain_speed(costs, rows):
    return rows / (float(costs.verify(rows)))


def best_static(costs, rows, chance):
    """The best fixed budget in hindsight, by arithmetic."""
    return max(
        rows * sum(chance**level for level in range(nodes + 1))
        / (float(costs.verify(rows * (1 + nodes))))
        for nodes in range(5)
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("table", TABLES)
def test_never_slower_than_plain_on_adversarial_text(table, rows):
    costs = TABLES[table]
    done = Simulation(costs, opened(costs, rows), rows).run(400, chance=0.0)
    assert done.speed >= 0.97 * plain_speed(costs, rows)


@pytest.mark.parametrize("table", TABLES)
def test_short_adversarial_sequences_learn_from_their_predecessors(table):
    costs = TABLES[table]
    done = Simulation(costs, opened(costs, 1)).run(1500, chance=0.0, length=50)
    assert done.speed >= 0.97 * plain_speed(costs, 1)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("table", TABLES)
def test_close_to_the_best_fixed_budget(table, rows, chance):
    costs = TABLES[table]
    done = Simulation(costs, opened(costs, rows), rows).run(400, chance)
    assert done.speed >= 0.93 * best_static(costs, rows, chance)


def test_flat_costs_and_good_guesses_use_everything():
    done = Simulation(FLAT, opened(FLAT, 1)).run(200, chance=0.9)
    assert np.mean(done.nodes) > 3.9
    assert done.speed > 3.5 * plain_speed(FLAT, 1)


def test_probes_cost_less_than_three_percent_and_never_stop():
    done = Simulation(STEEP, opened(STEEP, 1)).run(2000, chance=0.0)
    probes = np.flatnonzero(done.nodes[200:])
    assert len(probes) > 10
    extra = done.ms - 2000 * float(STEEP.verify(1))
    assert extra < 0.03 * done.ms


def test_nothing_is_probed_where_even_perfect_guesses_would_not_pay():
    linear = StepCosts((1, 64), (10.0, 640.0))
    done = Simulation(linear, opened(linear, 2), 2).run(500, chance=1.0)
    assert sum(done.nodes) == 0


@pytest.mark.parametrize("costs", [MIDDLE, STEEP], ids=["middle", "steep"])
def test_it_recovers_when_the_text_becomes_easy(costs):
    simulation = Simulation(costs, opened(costs, 1)).run(1000, chance=0.0)
    assert sum(simulation.nodes[-200:]) < 40
    simulation.run(400, chance=0.95)
    assert np.mean(np.array(simulation.nodes[-200:]) > 0) > 0.9


def test_what_deep_levels_once_were_is_forgotten():
    """Only the first draft token was ever right; then whole paths are."""
    policy = opened(MIDDLE, 1)
    for _ in range(200):
        budget = policy.budgets(slots_of(1), slots_of(1))[0]
        told(policy, [budget], [min(1, budget.nodes)])
    assert policy.budgets(slots_of(1), slots_of(1))[0].depth <= 2
    for _ in range(100):
        budget = policy.budgets(slots_of(1), slots_of(1))[0]
        told(policy, [budget], [budget.depth])
    assert policy.budgets(slots_of(1), slots_of(1))[0].depth == 4


def test_a_drafter_without_a_match_teaches_nothing_and_loses_no_probe():
    policy = opened(STEEP, 1)
    Simulation(STEEP, policy).run(300, chance=0.0)
    before = policy.budgets(slots_of(1), slots_of(1))[0].reason
    idle = Simulation(STEEP, policy).run(300, chance=1.0, match=0.0)
    assert sum(idle.nodes) == 0
    waiting = policy.budgets(slots_of(1), slots_of(1))[0]
    rate = "(the first is right in "
    assert before.partition(rate)[2][:2] == waiting.reason.partition(rate)[2][:2]
    assert waiting.nodes == 1, "the probe is still due"
    rare = Simulation(STEEP, policy).run(2000, chance=1.0, match=0.2)
    assert rare.speed > 1.1 * plain_speed(STEEP, 1)


def test_easy_and_hard_rows_of_one_batch_are_told_apart():
    policy = opened(MIDDLE, 4)
    for _ in range(150):
        budgets = policy.budgets(slots_of(4), np.zeros(4, np.int32))
        told(policy, budgets, [0, 0, budgets[2].depth, 0])
    nodes = [budget.nodes for budget in policy.budgets(slots_of(4), np.zeros(4, np.int32))]
    assert nodes[2] == 4
    assert nodes[0] + nodes[1] + nodes[3] <= 1, "one of them may be probing"


def test_long_contexts_make_guesses_dearer():
    costs = StepCosts((1, 64), (10.0, 11.0), attend_ms=3.0)
    policy = seen(opened(costs, 2))
    near, far = (
        policy.budgets(slots_of(2), np.array([10, 10], np.int32)),
        policy.budgets(slots_of(2), np.array([100_000, 100_000], np.int32)),
    )
    assert near[0].nodes == 4
    assert far[0].nodes < 4


levels = st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3)
increments = st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.lists(levels, min_size=1, max_size=3), increments, st.floats(0, 1), st.floats(0.5, 3))
def test_the_choice_is_the_best_of_all_choices(rates, rises, draft_ms, speed):
    """By brute force over every assignment of levels to rows, whatever the cost table's shape, and
    however fast steps are on average: most tokens beyond those that the time brings elsewhere.
    """
    rows = len(rates)
    times = np.cumsum([5.5, *rises])
    costs = StepCosts((1, 3, 6, 12), tuple(times), draft_ms=draft_ms)
    policy = seen(opened(costs, rows, nodes=3, depth=3))
    policy.acceptance._tries[:] = policy.acceptance._right[:] = 1e12
    policy.acceptance._right *= rates
    policy.guard._credit = 1e12  # Nothing is too dear to be tried.
    policy.guard._brought, policy.guard._paid = speed, 1.0
    for slot in range(rows):  # Not due for a probe.
        policy._tried[slot] = 1e12
    per_ms = max(1.0, speed) * rows / float(costs.verify(rows))

    def won(chosen):
        tokens = rows + sum(np.cumprod(rates[r])[:n].sum() for r, n in enumerate(chosen))
        nodes = sum(chosen)
        return tokens - per_ms * (float(costs.verify(rows + nodes)) + draft_ms * nodes)

    budgets = policy.budgets(slots_of(rows), np.zeros(rows, np.int32))
    mine = won([budget.nodes for budget in budgets])
    assert mine == pytest.approx(max(map(won, product(range(4), repeat=rows))), abs=1e-6)


def test_trees_are_bought_level_by_level():
    policy = seen(opened(FLAT, 1, nodes=16, depth=4))
    budget = policy.budgets(slots_of(1), slots_of(1))[0]
    assert (budget.nodes, budget.depth) == (16, 4)
    for _ in range(200):  # One of a level is right, and not the likeliest.
        budget = policy.budgets(slots_of(1), slots_of(1))[0]
        told(policy, [budget], [int(budget.nodes > 1)])
    assert budget.nodes == 4 * budget.depth < 16


def test_reasons_are_sentences_with_numbers():
    policy = seen(opened(STEEP, 1))
    Simulation(STEEP, policy).run(50, chance=0.0)
    reason = policy.budgets(slots_of(1), slots_of(1))[0].reason
    assert re.fullmatch(
        rf"{WRONG} \(the first is right in \d\d % of steps, [56]\d % would pay\)", reason
    )
    (easy,) = seen(opened(FLAT, 1)).budgets(slots_of(1), slots_of(1))
    assert easy.reason.startswith(ON_LEVELS.format(4)) and "right in 70 % of steps" in easy.reason
    assert policy.describe()["reasons"][WRONG] > 20


def test_costs_are_interpolated_and_continued():
    assert STEEP.verify(np.array([1, 3, 64, 80])).tolist() == pytest.approx(
        [10.6, 22.45, 312.0, 312.0 + 16 * (312.0 - 86.6) / 48]
    )


def test_fixed_is_fixed_and_nothing_is_nothing():
    policy = FixedPolicy(8, 3)
    policy.open(0)
    told_of = report_of([[1], [1]], [8, 0], 5.0)
    policy.observe(told_of)
    budgets = policy.budgets(slots_of(2), slots_of(2))
    assert [(b.nodes, b.depth) for b in budgets] == [(8, 3)] * 2
    assert opened(FLAT, 1).budgets(slots_of(0), slots_of(0)) == []
    with pytest.raises(ValueError, match="max_depth"):
        AdaptivePolicy(FLAT, 2, 3)
