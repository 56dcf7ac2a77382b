"""Room in the tree for forced tokens, also where the policy would not guess at all."""

from dataclasses import replace

from forerun.constrain.tree_mask import TreeGrammars
from forerun.spec.policy import Budget, Policy
from forerun.types import Ints

MAX_FORCED = 32
"""Forced tokens that one step takes at most."""


class ForcedBudgets:
    """The Policy contract around another policy.

    A forced token is certain to be accepted and costs one node of a step instead of a step of
    its own, so it always pays. What became of forced tokens is kept from the inner policy: it
    says nothing about the drafter.
    """

    def __init__(self, policy: Policy, grammars: TreeGrammars) -> None:
        self._policy = policy
        self._grammars = grammars
        self._forced: dict[int, int] = {}

    def open(self, slot: int) -> None:
        """Pass on."""
        self._policy.open(slot)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """The inner policy's budgets, raised to what is forced."""
        budgets = self._policy.budgets(slots, kv_len)
        for row, slot in enumerate(slots.tolist()):
            forced = min(self._grammars.forced(slot), MAX_FORCED)
            self._forced[slot] = forced
            nodes, depth = budgets[row].nodes, budgets[row].depth
            if forced > min(nodes, depth):
                reason = f"{budgets[row].reason}; {forced} forced by the grammar"
                budgets[row] = replace(
                    budgets[row], nodes=max(nodes, forced), depth=max(depth, forced), reason=reason
                )
        return budgets

    def observe(self, slot: int, guesses: int, accepted: int) -> None:
        """Pass on what concerns the drafter."""
        forced = min(self._forced.get(slot, 0), guesses)
        if guesses > forced:
            self._policy.observe(slot, guesses - forced, max(accepted - forced, 0))

    def close(self, slot: int) -> None:
        """Pass on."""
        self._forced.pop(slot, None)
        self._policy.close(slot)
