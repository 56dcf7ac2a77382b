"""Room in the tree for what a grammar makes certain or likely, also where the policy would not
guess at all.
"""

from dataclasses import replace

from forerun.constrain.tree_mask import TreeGrammars
from forerun.spec.policy import Budget, Policy
from forerun.types import Ints


class ForcedBudgets:
    """The Policy contract around another policy.

    A token that is certain to be accepted costs one node of a step instead of a step of its own.
    Of what is only likely, room is made for as much as pays (see Share). What became of these is
    kept from the inner policy: it says nothing about the drafter.
    """

    def __init__(self, policy: Policy, grammars: TreeGrammars) -> None:
        self._policy = policy
        self._grammars = grammars
        self._ahead: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """Pass on."""
        self._policy.open(slot)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """The inner policy's budgets, raised to what the grammar says."""
        budgets = self._policy.budgets(slots, kv_len)
        if not self._grammars.held:
            return budgets
        for row, ahead in enumerate(self._grammars.room(slots)):
            self._ahead[int(slots[row])] = ahead
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
