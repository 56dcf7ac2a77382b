"""Plain, one draft token or a tree, by what steps cost and what draft tokens bring.

The costs have the shape of what was published of a saturated server of 70B (requests/s: plain 0.62,
trees 0.52 to 0.56, one draft token 0.68), and of one with few sequences, where nodes cost hardly
anything. The policy sees a table that may be wrong, and steps.
"""

import numpy as np
import pytest

from forerun.control.adaptive import AdaptivePolicy
from forerun.control.step_costs import StepCosts
from tests.control.steps import MODEL, report_of, slots_of

NODES, DEPTH, BUSY = 15, 5, 64
"""Draft tokens of a tree, its levels, and rows of a server that is saturated."""

FIRST, SOME = 0.6, 0.75
"""The chance that the likeliest draft token is right, and that one of a level of three is."""

TREE = sum(SOME**level for level in range(DEPTH + 1))
SATURATED = {
    1: 40.0, 2: 41.0, 4: 41.5, 16: 45.0,
    BUSY: 100.0,
    2 * BUSY: (1 + FIRST) * 100.0 * 0.62 / 0.68,
    (1 + NODES) * BUSY: TREE * 100.0 * 0.62 / 0.54,
}  # fmt: skip
COSTS = StepCosts(tuple(SATURATED), tuple(SATURATED.values()), drafts_in_step=True)


class Load:
    """Sequences of so many rows; the drafter's tokens are right as often as `honesty` says."""

    def __init__(self, believed=COSTS, honesty=1.0, seed=0):
        self.policy = AdaptivePolicy(believed, NODES, DEPTH, MODEL)
        self.random, self.honesty = np.random.default_rng(seed), honesty

    def right(self, nodes):
        """How long the accepted path of a row with such a budget is."""
        if nodes == 1:
            return int(self.random.random() < self.honesty * FIRST)
        wrong = self.random.random(nodes * DEPTH // NODES) >= self.honesty * SOME
        return int(np.argmax(np.append(wrong, True)))

    def run(self, rows, steps):
        """Budgets of the steps, and tokens per ms over those of plain decoding in the last half."""
        made, tokens, ms = [], 0, 0.0
        for step in range(steps):
            cached = np.full(rows, 64, np.int32)
            decision = self.policy.decide(slots_of(rows), cached)
            nodes = [budget.nodes for budget in decision.rows]
            right = [self.right(count) if count else 0 for count in nodes]
            taken = float(COSTS.verify(np.array(rows + sum(nodes))))
            said = [[1] * (1 + count) for count in right]
            facts = {"carried": True, "reason": decision.reason}
            self.policy.observe(report_of(said, nodes, taken, **facts))
            made.append(nodes)
            if step >= steps // 2:
                tokens, ms = tokens + rows + sum(right), ms + taken
        plain = rows / float(COSTS.verify(np.array(rows)))
        return np.array(made[steps // 2 :]), tokens / ms / plain


@pytest.mark.parametrize("rows", [1, 2])
def test_with_few_sequences_it_is_the_tree(rows):
    nodes, speed = Load().run(rows, 600)
    assert (nodes == NODES).mean() > 0.9 or (rows == 2 and (nodes > 1).mean() > 0.9)
    assert speed > 0.97 * TREE * float(COSTS.verify(np.array(rows))) / float(
        COSTS.verify(np.array(rows * (1 + NODES)))
    )


@pytest.mark.parametrize("rows", [1, BUSY])
def test_with_useless_draft_tokens_it_is_plain(rows):
    nodes, speed = Load(honesty=0.0).run(rows, 600)
    # A look is one level; for one row it costs so little that it is taken often.
    assert nodes.max() <= NODES and (nodes <= NODES // DEPTH).mean() > 0.9
    assert (nodes > 0).mean() < (0.6 if rows == 1 else 0.1)
    assert speed > 0.97


def test_load_that_comes_and_goes_changes_it_back_and_forth():
    load = Load()
    for _ in range(2):
        few, _ = load.run(1, 400)
        assert (few == NODES).mean() > 0.9
        many, speed = load.run(BUSY, 400)
        assert (many == 1).mean() > 0.9 and speed > 1.07


def test_a_table_that_is_wrong_is_corrected_by_steps():
    """Start-up said that nodes are free: then a tree would be right."""
    ms = tuple(40.0 + 0.01 * count for count in COSTS.nodes)
    free = StepCosts(COSTS.nodes, ms, drafts_in_step=True)
    nodes, speed = Load(free).run(BUSY, 800)
    assert (nodes == 1).mean() > 0.85 and (nodes > 1).mean() < 0.01 and speed > 1.07
