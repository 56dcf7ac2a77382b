"""What becomes of a drafter that fails: speculation ends, requests do not."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from forerun.interface.drafter import Drafter
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan, Outcome, Plan, SlotInit
from forerun.speculative.tree import NO_DRAFT, Draft, TreeBatch
from forerun.types import Ints

log = logging.getLogger("forerun.engine")

Result = TypeVar("Result")


def off(reason: str) -> str:
    """How every part of the system words that nothing is drafted although it should be."""
    return f"speculation is off: {reason}"


class GuardedDrafter:
    """The Drafter contract around another drafter, until that raises for the first time.

    From then on nothing is proposed and the other is not called again: what it knows of the
    sequences may be half written.

    fault   why nothing is drafted although it should be, in the words of `off`; None = all is well
    failed  called with the fault when the other raises
    """

    def __init__(
        self,
        inner: Drafter,
        fault: str | None = None,
        failed: Callable[[str], None] = lambda fault: None,
    ) -> None:
        self.traits = inner.traits
        self.fault = fault
        self._inner, self._failed = inner, failed

    def begin(self, slot_init: SlotInit) -> None:
        """Pass on."""
        self._attempt(lambda: self._inner.begin(slot_init), None)

    def propose(self, plan: Plan) -> list[Draft]:
        """What the other drafter proposes, or an empty draft per row."""
        return self._attempt(lambda: self._inner.propose(plan), [NO_DRAFT] * plan.rows)

    def draft_request(self, plan: Plan | CarriedPlan) -> DraftRequest | None:
        """What the other drafter asks for; nothing once it failed."""
        return self._attempt(lambda: self._inner.draft_request(plan), None)

    def carry(self, plan: CarriedPlan, drafting: Ints) -> bool:
        """Pass on; no step is carried for a drafter that failed."""
        return self._attempt(lambda: self._inner.carry(plan, drafting), False)

    def observe(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> None:
        """Pass on."""
        self._attempt(lambda: self._inner.observe(plan, trees, outcome), None)

    def end(self, slot: int) -> None:
        """Pass on."""
        self._attempt(lambda: self._inner.end(slot), None)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return self._inner.describe() | {"fault": self.fault}

    def _attempt(self, action: Callable[[], Result], otherwise: Result) -> Result:
        if self.fault is not None:
            return otherwise
        try:
            return action()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.fault = off(f"the drafter {self.traits.name} failed with {what}")
            log.exception("%s", self.fault)
            self._failed(self.fault)
            return otherwise
