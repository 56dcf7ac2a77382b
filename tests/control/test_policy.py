"""A drafter that costs time: levels against brute force, and over simulated text."""

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy
from forerun.control.reasons import ON_LEVELS, TOO_RISKY, TOO_SLOW, WRONG
from forerun.control.step_costs import StepCosts
from tests.control.steps import MODEL, report_of, seen, slots_of
from tests.covering import covering, every

FLAT = StepCosts((1, 8, 64, 256), (10.0, 10.5, 12.0, 20.0), drafts_in_step=True)
MIDDLE = StepCosts((1, 2, 4, 8, 16, 64), (6.1, 6.6, 7.6, 10.7, 19.2, 71.9), drafts_in_step=True)
STEEP = StepCosts((1, 2, 4, 8, 16, 64), (10.6, 16.1, 28.8, 54.8, 86.6, 312.0), drafts_in_step=True)
TABLES = {"flat": FLAT, "middle": MIDDLE, "steep": STEEP}


def opened(costs: StepCosts, rows: int, nodes: int = 4, depth: int = 4) -> AdaptivePolicy:
    return AdaptivePolicy(costs, nodes, depth, MODEL)


def decide(policy, rows, cached=64):
    return policy.decide(slots_of(rows), np.full(rows, cached, np.int32)).rows


def observe(policy, budgets, accepted, counts=None, ms=None):
    """The policy hears what became of its budgets: `counts` draft tokens that the device made by
    itself, `accepted` of them right; `ms`, or what the table says.
    """
    counts = [budget.nodes for budget in budgets] if counts is None else counts
    costs = policy.account.costs.measured
    nodes = len(budgets) + sum(counts)
    policy.observe(
        report_of(
            [[1] * (1 + right) for right in accepted],
            counts,
            float(costs.verify(np.array(nodes))) if ms is None else ms,
            draft_ms=costs.draft_ms * sum(counts),
            allowed=[budget.nodes for budget in budgets],
            carried=True,
            reason=budgets[0].reason,
        )
    )


class Simulation:
    """Rows whose level-by-level acceptance is a chance, and the clock of a cost table."""

    def __init__(self, costs, policy, rows=1, seed=0):
        self.costs, self.policy, self.rows = costs, policy, rows
        self.random = np.random.default_rng(seed)
        self.ms = self.tokens = 0.0
        self.nodes: list[int] = []

    def run(self, steps, chance, match=1.0):
        """`match`: how often the drafter finds anything."""
        for _ in range(steps):
            budgets = decide(self.policy, self.rows)
            draft_tokens = [b.nodes if self.random.random() < match else 0 for b in budgets]
            right = []
            for budget, count in zip(budgets, draft_tokens, strict=True):
                accepted = 0
                while accepted < min(budget.depth, count) and self.random.random() < chance:
                    accepted += 1
                right.append(accepted)
            self.tokens += len(right) + sum(right)
            observe(self.policy, budgets, right, draft_tokens)
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
    done = Simulation(costs, opened(costs, rows), rows).run(1500 if rows == 1 else 400, chance=0.0)
    assert done.speed >= 0.97 * plain_speed(costs, rows)


@pytest.mark.parametrize(
    ("table", "rows", "chance"), covering(every(TABLES, [1, 4, 16], [0.3, 0.6, 0.9]))
)
def test_close_to_the_best_fixed_budget(table, rows, chance):
    costs = TABLES[table]
    done = Simulation(costs, opened(costs, rows), rows).run(400, chance)
    assert done.speed >= 0.93 * best_static(costs, rows, chance)


def test_probes_cost_less_than_three_percent_and_never_stop():
    done = Simulation(STEEP, opened(STEEP, 1)).run(2000, chance=0.0)
    probes = np.flatnonzero(done.nodes[200:])
    assert len(probes) > 10
    extra = done.ms - 2000 * float(STEEP.verify(1))
    assert extra < 0.03 * done.ms


def test_nothing_is_probed_where_even_perfect_guesses_would_not_pay():
    linear = StepCosts((1, 64), (10.0, 640.0), drafts_in_step=True)
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
        budget = decide(policy, 1)[0]
        observe(policy, [budget], [min(1, budget.nodes)])
    assert decide(policy, 1)[0].depth <= 2
    for _ in range(100):
        budget = decide(policy, 1)[0]
        observe(policy, [budget], [budget.depth])
    assert decide(policy, 1)[0].depth == 4


def test_reasons_are_sentences():
    policy = seen(opened(STEEP, 1))
    Simulation(STEEP, policy).run(50, chance=0.0)
    assert decide(policy, 1)[0].reason == WRONG
    (easy,) = decide(seen(opened(FLAT, 1)), 1)
    assert easy.reason == ON_LEVELS.format(4)
    facts = policy.describe()
    assert facts["reasons"][WRONG] > 10 and facts["right_by_level"][0] < 0.25


def test_a_reason_says_what_was_measured():
    """A layer that never ran was once called wrong too often."""
    linear = StepCosts((1, 64), (10.0, 640.0), drafts_in_step=True)
    assert decide(seen(opened(linear, 2)), 2)[0].reason == TOO_SLOW
    policy = seen(opened(STEEP, 1))
    policy.account.model.credit = 0.0
    assert decide(policy, 1)[0].reason == TOO_RISKY


def test_costs_are_interpolated_and_continued():
    assert STEEP.verify(np.array([1, 3, 64, 80])).tolist() == pytest.approx(
        [10.6, 22.45, 312.0, 312.0 + 16 * (312.0 - 86.6) / 48]
    )


def test_fixed_is_fixed_and_nothing_is_nothing():
    policy = FixedPolicy(8, 3)
    told_of = report_of([[1], [1]], [8, 0], 5.0)
    policy.observe(told_of)
    budgets = decide(policy, 2)
    assert [(b.nodes, b.depth) for b in budgets] == [(8, 3)] * 2
    with pytest.raises(ValueError, match="max_depth"):
        AdaptivePolicy(FLAT, 2, 3, MODEL)
