"""The drafter that never drafts: plain decoding is a tree of one node."""

from typing import Any

from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Outcome, Plan, Round
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import Draft, TreeBatch


class NoDrafter:
    """Proposes nothing."""

    traits = DrafterTraits(name="none", max_depth=0)

    def begin(self, slot_init: SlotInit) -> None:
        """Do nothing: there is no state per sequence."""

    def propose(self, plan: Plan) -> list[Draft]:
        """Return B empty drafts."""
        return [Draft()] * plan.rows

    def on_device_draft(self, plan: Plan) -> None:
        """Return None: there is no draft model."""

    def can_overlap(self, plan: Plan, running: Round) -> bool:
        """Return True: a step without draft tokens needs nothing of the running round."""
        return True

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Do nothing: there is nothing to learn."""

    def end(self, slot: int) -> None:
        """Do nothing: there is no state per sequence."""

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: {"drafter": "none"}."""
        return {"drafter": self.traits.name}
