"""Lookup in the text where that is sure of itself, a draft head everywhere else."""

from dataclasses import replace
from typing import Any

import numpy as np

from forerun.interface.drafter import Drafter, DrafterTraits
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.speculative.tree import Draft, TreeBatch
from forerun.types import Ints


class CombinedDrafter:
    """The Drafter contract around two others.

    A row whose lookup finds something gives the head no work, and what is found may be deeper
    than what the head drafts well: names, code and quotations are repeated whole. To the head
    such a row looks like one for which nobody wants draft tokens.

    bar  least score of a lookup's first draft token, its estimate of being right
    """

    def __init__(self, lookup: Drafter, head: Drafter, bar: float) -> None:
        self.traits = DrafterTraits(
            name=f"{head.traits.name}+{lookup.traits.name}",
            max_depth=head.traits.max_depth,
            needs_features=head.traits.needs_features,
        )
        self._lookup, self._head, self._bar = lookup, head, bar
        self._left: Plan | None = None

    def begin(self, slot_init: SlotInit) -> None:
        """Pass on to both."""
        self._lookup.begin(slot_init)
        self._head.begin(slot_init)

    def propose(self, plan: Plan) -> list[Draft]:
        """The lookup's draft where it is sure, else the head's."""
        found = self._lookup.propose(plan)
        sure = np.array([len(draft) > 0 and draft.score[0] >= self._bar for draft in found])
        left = replace(plan, max_nodes=np.where(sure, 0, plan.max_nodes).astype(np.int32))
        self._left = left
        grown = self._head.propose(left)
        return [a if yes else b for a, b, yes in zip(found, grown, sure, strict=True)]

    def draft_request(self, plan: Plan | CarriedPlan) -> DraftRequest | None:
        """The head's: rows whose lookup is sure are extended all the same."""
        return self._head.draft_request(plan)

    def carry(self, plan: CarriedPlan, drafting: Ints) -> bool:
        """Lookup needs the text, and a head that is not asked the features of every step."""
        return False

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Pass on to both."""
        left, self._left = self._left or plan, None
        self._lookup.observe(plan, trees, outcome)
        self._head.observe(left, trees, outcome)

    def end(self, slot: int) -> None:
        """Pass on to both."""
        self._lookup.end(slot)
        self._head.end(slot)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {
            "name": self.traits.name,
            "bar": self._bar,
            "lookup": self._lookup.describe(),
            "head": self._head.describe(),
        }
