"""The door to the control of speculation: who asks what, and the policy that never changes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forerun.control.constants import FIXED_MIN_PROB
from forerun.control.report import StepReport
from forerun.interface.plan import Plan
from forerun.speculative.tree import Draft
from forerun.types import Ints

FIXED = "fixed by the configuration"


def off(reason: str) -> str:
    """How every part of the system words that nothing is drafted although it should be."""
    return f"speculation is off: {reason}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What one row may draft in the next step, and why, in words for people.

    nodes   draft tokens at most
    depth   longest path of draft tokens
    min_prob  draft tokens less likely than this would not be verified
    model_depth  of that, how deep a draft model may go that drafts one tree with free drafters; 0:
            only these are asked
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0
    model_depth: int = 0


class Lookahead(Protocol):
    """What grammars know of the coming tokens."""

    def predicted(self, slots: Ints, min_prob: float) -> list[list[float]]:
        """Per slot, the probabilities of tokens that are certain or likely to follow, best first,
        none below `min_prob`; empty where no grammar holds the slot.
        """
        ...


class Budgets(Protocol):
    """What a scheduler asks of a policy."""

    def budgets(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> list[Budget]:
        """One budget per row of the coming step: slots int32[B], cached tokens int32[B]; whether
        a grammar holds some row.
        """
        ...


class Policy(Budgets, Protocol):
    """Chooses draft tokens and learns from what became of them."""

    def open(self, slot: int) -> None:
        """A sequence took the slot; forget its predecessor."""
        ...

    def calibrate(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """The drafter's proposals, one per row, with scores as far as they are believed."""
        ...

    def select(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """What is worth verifying of `drafts`, one per row; parents of what is kept are kept."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a step that is over; once for every step."""
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

    def budgets(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> list[Budget]:
        """One and the same budget for every row, more where a grammar knows more."""
        budgets = [self._budget] * len(slots)
        if self._lookahead is None or not constrained:
            return budgets
        return widened(budgets, list(map(len, self._lookahead.predicted(slots, FIXED_MIN_PROB))))

    def calibrate(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """Unchanged."""
        return drafts

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


def widened(budgets: list[Budget], known: Iterable[int]) -> list[Budget]:
    """The budgets with room for so many tokens that the grammar knows in each row."""
    return [
        replace(
            budget,
            nodes=max(budget.nodes, int(count)),
            depth=max(budget.depth, int(count)),
            reason=f"{budget.reason}; {count} tokens known from the grammar",
        )
        if count > min(budget.nodes, budget.depth)
        else budget
        for budget, count in zip(budgets, known, strict=True)
    ]
