"""The door to the control of speculation: one answer per step; the policy that never changes."""

from dataclasses import replace
from typing import Any, Protocol

from forerun.control.constants import FIXED_MIN_PROB
from forerun.control.report import StepReport
from forerun.interface.plan import Budget, Plan
from forerun.speculative.tree import Draft
from forerun.types import Ints

FIXED = "fixed by the configuration"


def off(reason: str) -> str:
    """How every part of the system words that nothing is drafted although it should be."""
    return f"speculation is off: {reason}"


class Lookahead(Protocol):
    """What grammars know of the coming tokens."""

    def predicted(self, slots: Ints, min_prob: float) -> list[list[float]]:
        """Per slot, the probabilities of tokens that are certain or likely to follow, best first,
        none below `min_prob`; empty where no grammar holds the slot.
        """
        ...


class Policy(Protocol):
    """Chooses draft tokens and learns from what became of them."""

    def open(self, slot: int) -> None:
        """A sequence took the slot; forget its predecessor."""
        ...

    def budget(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Budget:
        """What the rows of the coming step may draft: slots int32[B], B > 0, cached tokens
        int32[B]; whether a grammar holds some row. A plan may be thrown away: the policy goes on
        with what it observes, not with what it was asked.
        """
        ...

    def select(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """Of all draft tokens that were found on the host, one draft per row, those that pay.

        drafts  of the drafter and the grammars, with the drafter's scores
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a step that is over."""
        ...

    def disable(self, reason: str) -> None:
        """The drafter failed: from now on only what grammars know is drafted."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        ...


class FixedPolicy:
    """The same budget always, and room for what a grammar forces or makes likely."""

    def __init__(self, nodes: int, depth: int, lookahead: Lookahead | None = None) -> None:
        self._budget = Budget(nodes, depth, FIXED, model_depth=depth)
        self._lookahead = lookahead

    def open(self, slot: int) -> None:
        """Nothing to remember."""

    def budget(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Budget:
        """One and the same, with more where a grammar knows more."""
        if self._lookahead is None or not constrained:
            return self._budget
        found = self._lookahead.predicted(slots, FIXED_MIN_PROB)
        return replace(self._budget, known=tuple(map(len, found)))

    def select(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """All."""
        return drafts

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""

    def disable(self, reason: str) -> None:
        """Nothing but what grammars know from now on."""
        self._budget = Budget(0, 0, reason)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"policy": "fixed", "nodes": self._budget.nodes, "depth": self._budget.depth}
