"""The contract of policies, which decide once per step, for the whole batch, what may be drafted,
and are told what the step was; and FixedPolicy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forerun.control.report import StepReport
from forerun.interface.plan import Prices
from forerun.speculative.tree import Draft
from forerun.types import Ints

FIXED = "fixed by the configuration"
FIXED_MIN_PROB = 0.35
"""A token that a grammar makes less likely than this is not drafted where nobody knows what a node
costs: by the fixed policy, and in rounds of a device."""


def off(reason: str) -> str:
    """How every part of the system words that nothing is drafted although it should be."""
    return f"speculation is off: {reason}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a row may draft in the next step, and why, in words for people.

    nodes   draft tokens at most
    depth   longest path of draft tokens
    min_prob  draft tokens less likely than this would not be verified
    model_depth  of `depth`, how deep a draft model may go that drafts one tree together with free
            drafters; 0: only the free drafters are asked
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0
    model_depth: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step may draft. A value: to ask for it, and not to use it, changes nothing.

    reason  in words for people
    rows    B budgets; all zero: the step is exactly a plain one
    select  of what drafter and grammars found on the host, a draft per row, that which pays; None:
            all of it. Valid until the policy observes the next step
    prices  by which the drafter buys, instead (Plan.prices)
    """

    reason: str
    rows: tuple[Budget, ...]
    select: Callable[[list[Draft]], list[Draft]] | None = None
    prices: Prices | None = None


def with_known(budgets: tuple[Budget, ...], known: list[int]) -> tuple[Budget, ...]:
    """The budgets of rows, with room for so many tokens that their grammars know."""
    rows = list(budgets)
    for row, (budget, count) in enumerate(zip(budgets, known, strict=True)):
        if count > min(budget.nodes, budget.depth):
            nodes, depth = max(budget.nodes, count), max(budget.depth, count)
            reason = f"{budget.reason}; {count} tokens known from the grammar"
            rows[row] = replace(budget, nodes=nodes, depth=depth, reason=reason)
    return tuple(rows)


class Lookahead(Protocol):
    """What grammars know of the coming tokens."""

    def predicted(self, slots: Ints, min_prob: float) -> list[list[float]]:
        """Per slot, the probabilities of tokens that are certain or likely to follow, best first,
        none below `min_prob`; empty where no grammar holds the slot.
        """
        ...


class Policy(Protocol):
    """Decides what is drafted, and learns from what came of it."""

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """What the decoding rows of the coming step may draft: slots int32[B], B > 0, cached tokens
        int32[B]; whether a grammar holds some row. Changes nothing that is decided later.
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

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """One and the same, with more where a grammar knows more."""
        rows = (self._budget,) * len(slots)
        if self._lookahead is not None and constrained:
            known = self._lookahead.predicted(slots, FIXED_MIN_PROB)
            rows = with_known(rows, list(map(len, known)))
        return Decision(self._budget.reason, rows)

    def observe(self, report: StepReport) -> None:
        """Nothing to learn."""

    def disable(self, reason: str) -> None:
        """Nothing but what grammars know from now on."""
        self._budget = Budget(0, 0, reason)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        return {"policy": "fixed", "nodes": self._budget.nodes, "depth": self._budget.depth}
