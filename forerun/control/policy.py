"""The contract of policies, which decide once per step, for the whole batch, what may be drafted,
and learn from the step's report; and FixedPolicy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forerun.control.report import StepReport
from forerun.interface.plan import NodeCosts
from forerun.speculative.tree import Draft
from forerun.types import Ints

FIXED = "fixed by the configuration"
FIXED_MIN_PROB = 0.35
"""Least probability of a grammar's token to be drafted if a node's cost is unknown: in the fixed
policy, and in rounds of a device.
"""


def off(reason: str) -> str:
    """Word the reason for disabled speculation as every part of the system does."""
    return f"speculation is off: {reason}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a row may draft in the next step, and why, as text for users.

    nodes   most draft tokens
    depth   longest path of draft tokens
    min_prob  less probable draft tokens would not be verified
    model_depth  most levels of `depth` for a draft model that shares a tree with other drafters; 0:
                 only the others propose
    pass_prob  a pass of the draft model below less probable paths takes longer than it saves
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0
    model_depth: int = 0
    pass_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step may draft. A value: deciding again, or not using it, changes nothing.

    reason  text for users
    rows    B budgets; all zero: a plain step
    select  chooses what to verify of the host's proposals, one draft per row; None: all of it.
            Valid until the policy observes the next step
    node_costs  for a drafter that selects by itself, instead (Plan.node_costs)
    """

    reason: str
    rows: tuple[Budget, ...]
    select: Callable[[list[Draft]], list[Draft]] | None = None
    node_costs: NodeCosts | None = None


def with_known(budgets: tuple[Budget, ...], known: list[int]) -> tuple[Budget, ...]:
    """Return the budgets of rows, extended to the number of tokens that each row's grammar
    knows.
    """
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
        """Return per slot the probabilities of certain or likely next tokens, best first, none
        below `min_prob`; empty without a grammar.
        """
        ...


class Policy(Protocol):
    """Decides what is drafted, and learns from the results."""

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """Return what the decoding rows of the coming step may draft. slots, kv_len (cached
        tokens): int32[B], B > 0. constrained: some row has a grammar. Changes no later decision.
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a finished step."""
        ...

    def disable(self, reason: str) -> None:
        """Stop drafting, except what grammars know: the drafter failed."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info."""
        ...


class FixedPolicy:
    """The same budget always, plus room for tokens that a grammar forces or makes likely."""

    def __init__(self, nodes: int, depth: int, lookahead: Lookahead | None = None) -> None:
        self._budget = Budget(nodes, depth, FIXED, model_depth=depth)
        self._lookahead = lookahead

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """Return the same budgets, larger for rows whose grammars know more."""
        rows = (self._budget,) * len(slots)
        if self._lookahead is not None and constrained:
            known = self._lookahead.predicted(slots, FIXED_MIN_PROB)
            rows = with_known(rows, list(map(len, known)))
        return Decision(self._budget.reason, rows)

    def observe(self, report: StepReport) -> None:
        """Do nothing."""

    def disable(self, reason: str) -> None:
        """Stop drafting, except what grammars know."""
        self._budget = Budget(0, 0, reason)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info."""
        return {"policy": "fixed", "nodes": self._budget.nodes, "depth": self._budget.depth}
