"""Room in the tree for what a grammar makes certain or likely, also where the policy would not
draft token at all.
"""

from dataclasses import replace

from forerun.constrain.tree_mask import TreeGrammars
from forerun.control.policy import Budget, Policy
from forerun.types import Ints


class GrammarPolicy:
    """The Policy contract around another policy.

    A token that is certain to be accepted costs one node of a step instead of a step of its own.
    Of what is only likely, room is made for as much as pays (see GrammarBudget).
    What became of these is kept from the inner policy: it says nothing about the drafter.
    """

    def __init__(self, policy: Policy, grammars: TreeGrammars) -> None:
        self._policy = policy
        self._grammars = grammars
        self._predicted: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """Pass on."""
        self._policy.open(slot)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """The inner policy's budgets, raised to what the grammar says."""
        budgets = self._policy.budgets(slots, kv_len)
        if not budgets or not self._grammars.held:
            return budgets
        for row, predicted in enumerate(self._grammars.room(slots)):
            self._predicted[int(slots[row])] = predicted
            nodes, depth = budgets[row].nodes, budgets[row].depth
            if predicted > min(nodes, depth):
                reason = f"{budgets[row].reason}; {predicted} known from the grammar"
                budgets[row] = replace(
                    budgets[row],
                    nodes=max(nodes, predicted),
                    depth=max(depth, predicted),
                    reason=reason,
                )
        return budgets

    def observe(self, slot: int, draft_tokens: int, accepted: int) -> None:
        """Pass on what concerns the drafter."""
        predicted = self._predicted.get(slot, 0)
        if draft_tokens > predicted and accepted >= predicted:
            self._policy.observe(slot, draft_tokens - predicted, accepted - predicted)

    def close(self, slot: int) -> None:
        """Pass on."""
        self._predicted.pop(slot, None)
        self._policy.close(slot)
