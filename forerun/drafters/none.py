"""The drafter that never drafts: plain decoding is a tree of one node."""

from typing import Any

from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome, Plan, Round, SlotInit
from forerun.speculative.tree import Draft, TreeBatch


class NoDrafter:
    """Proposes nothing."""

    traits = DrafterTraits(name="none", max_depth=0)

    def begin(self, slot_init: SlotInit) -> None:
        """Nothing to remember."""

    def propose(self, plan: Plan) -> list[Draft]:
        """An empty draft per row."""
        return [Draft()] * plan.rows

    def draft_request(self, plan: Plan) -> None:
        """There is no draft model."""

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Nothing to propose, nothing to observe."""
        return True

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Nothing to learn."""

    def end(self, slot: int) -> None:
        """Nothing to forget."""

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"drafter": self.traits.name}
