"""Room in the tree for what a grammar makes certain or likely, also where the policy would not
guess at all.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from forerun.constrain.guide import LEAST
from forerun.constrain.tree_mask import TreeGrammars
from forerun.spec.costs import StepCosts
from forerun.spec.policy import Budget, Policy
from forerun.types import Ints


class ForcedBudgets:
    """The Policy contract around another policy.

    A forced token is certain to be accepted and costs one node of a step instead of a step of
    its own, so it always pays. Likely ones do where they are more likely than what a node costs,
    in tokens. What became of these is kept from the inner policy: it says nothing about the
    drafter.

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
        least = least_chance(self._costs, len(slots))
        for row, slot in enumerate(slots.tolist()):
            ahead = self._ahead[slot] = self._grammars.ahead(slot, least)
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


@lru_cache(maxsize=1024)
def least_chance(costs: StepCosts | None, rows: int) -> float:
    """How likely a token must be to be worth a node, with two more for each of `rows` rows."""
    if costs is None or rows == 0:
        return LEAST
    step, larger = costs.verify(np.array([rows, 3 * rows]))
    return min(1.0, max(LEAST, float(larger / step - 1.0) / 2.0))
