"""Room in the tree for what a grammar makes certain or likely, also where the policy would not
guess at all.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from forerun.constrain.guide import LEAST, LIKELY
from forerun.constrain.tree_mask import TreeGrammars
from forerun.spec.costs import StepCosts
from forerun.spec.policy import Budget, Policy
from forerun.types import Ints


class ForcedBudgets:
    """The Policy contract around another policy.

    A token that is certain to be accepted costs one node of a step instead of a step of its own.
    Of what is only likely, as much is drafted as makes the step's expected tokens per
    millisecond largest, over all rows. What became of these is kept from the inner policy: it
    says nothing about the drafter.

    costs  what steps cost on this machine; None = a node costs next to nothing
    """

    def __init__(
        self, policy: Policy, grammars: TreeGrammars, costs: StepCosts | None = None
    ) -> None:
        self._policy = policy
        self._grammars = grammars
        self._costs = costs
        self._ahead: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """Pass on."""
        self._policy.open(slot)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """The inner policy's budgets, raised to what the grammar says."""
        budgets = self._policy.budgets(slots, kv_len)
        if not self._grammars.held:
            return budgets
        least = least_chance(self._costs, len(slots))
        chains = [self._grammars.ahead(slot, least) for slot in slots.tolist()]
        for row, ahead in enumerate(worthwhile(chains, self._costs)):
            slot = int(slots[row])
            self._ahead[slot] = ahead
            self._grammars.limit(slot, ahead)
            nodes, depth = budgets[row].nodes, budgets[row].depth
            if ahead > min(nodes, depth):
                reason = f"{budgets[row].reason}; {ahead} known from the grammar"
                budgets[row] = replace(
                    budgets[row], nodes=max(nodes, ahead), depth=max(depth, ahead), reason=reason
                )
        return budgets

    def observe(self, slot: int, guesses: int, accepted: int) -> None:
        """Pass on what concerns the drafter."""
        ahead = self._ahead.get(slot, 0)
        if guesses > ahead and accepted >= ahead:
            self._policy.observe(slot, guesses - ahead, accepted - ahead)

    def close(self, slot: int) -> None:
        """Pass on."""
        self._ahead.pop(slot, None)
        self._policy.close(slot)


def worthwhile(chains: list[list[float]], costs: StepCosts | None) -> list[int]:
    """How many tokens of each row's chain to draft, given the probability of each one's path."""
    if costs is None:
        return [len(chain) for chain in chains]
    ranked = sorted(
        ((chance, row) for row, chain in enumerate(chains) for chance in chain), reverse=True
    )
    if not ranked:
        return [0] * len(chains)
    rows = len(chains)
    ms = costs.verify(rows + np.arange(len(ranked) + 1)).tolist()
    tokens, fastest, best = float(rows), rows / ms[0], 0
    for number, (chance, _) in enumerate(ranked, 1):
        tokens += chance
        if tokens / ms[number] >= fastest:
            fastest, best = tokens / ms[number], number
    chosen = [0] * rows
    for _, row in ranked[:best]:
        chosen[row] += 1
    return chosen


@lru_cache(maxsize=1024)
def least_chance(costs: StepCosts | None, rows: int) -> float:
    """How likely a token must be to be worth a node, with two more for each of `rows` rows."""
    if costs is None or rows == 0:
        return LIKELY
    step, larger = costs.verify(np.array([rows, 3 * rows]))
    return min(1.0, max(LEAST, float(larger / step - 1.0) / 2.0))
