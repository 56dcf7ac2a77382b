"""The interface of policies, which decide once per step, for the whole batch, what may be drafted,
and learn from the step's report. Also FixedPolicy.
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
    """Return the sentence that reports disabled speculation, with its reason."""
    return f"speculation is off: {reason}"


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a row's draft in the next step.

    nodes   most draft tokens
    depth   longest path of draft tokens
    reason  text for users
    min_prob  draft tokens of a lower probability are not verified
    model_depth  most levels of `depth` for a draft model that shares a tree with other drafters; 0:
                 only the others propose
    pass_prob  below less probable paths, a pass of the draft model takes longer than it saves
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0
    model_depth: int = 0
    pass_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The limits of a step's drafts. A value: it may be recomputed or dropped without any effect.

    reason  text for users
    rows    B budgets; all zero: a plain step
    select  chooses what to verify of the host's proposals, one draft per row; None: all of it.
            Valid until the policy observes the next step
    node_costs  for a drafter that selects by itself, instead of `select` (Plan.node_costs)
    """

    reason: str
    rows: tuple[Budget, ...]
    select: Callable[[list[Draft]], list[Draft]] | None = None
    node_costs: NodeCosts | None = None


def with_known(budgets: tuple[Budget, ...], known: list[int]) -> tuple[Budget, ...]:
    """Return the budgets, raised where a row's grammar predicts more tokens than they allow.

    known  B counts of tokens that each row's grammar predicts
    """
    rows = list(budgets)
    for row, (budget, count) in enumerate(zip(budgets, known, strict=True)):
        if count > min(budget.nodes, budget.depth):
            nodes, depth = max(budget.nodes, count), max(budget.depth, count)
            reason = f"{budget.reason}; {count} tokens known from the grammar"
            rows[row] = replace(budget, nodes=nodes, depth=depth, reason=reason)
    return tuple(rows)


class Lookahead(Protocol):
    """Predicts next tokens from grammars."""

    def predicted(self, slots: Ints, min_prob: float) -> list[list[float]]:
        """Return, for each of int32[B] slots, the probabilities of the tokens that its grammar
        forces or makes likely, best first, none below `min_prob`; empty without a grammar.
        """
        ...


class Policy(Protocol):
    """Decides what is drafted, and learns from the results."""

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """Return what the decoding rows of the coming step may draft. Changes no later decision.

        slots        int32[B], B > 0
        kv_len       int32[B] cached tokens
        constrained  some row has a grammar
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a finished step."""
        ...

    def disable(self, reason: str) -> None:
        """Stop drafting for `reason` (the drafter failed), except for tokens that grammars
        predict.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info."""
        ...


class FixedPolicy:
    """Always returns the same budget, plus room for tokens that a grammar forces or makes
    likely.
    """

    def __init__(self, nodes: int, depth: int, lookahead: Lookahead | None = None) -> None:
        self._budget = Budget(nodes, depth, FIXED, model_depth=depth)
        self._lookahead = lookahead

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """Implement Policy.decide: the same budgets, larger for rows whose grammars predict
        more.
        """
        rows = (self._budget,) * len(slots)
        if self._lookahead is not None and constrained:
            known = self._lookahead.predicted(slots, FIXED_MIN_PROB)
            rows = with_known(rows, list(map(len, known)))
        return Decision(self._budget.reason, rows)

    def observe(self, report: StepReport) -> None:
        """Do nothing."""

    def disable(self, reason: str) -> None:
        """Implement Policy.disable."""
        self._budget = Budget(0, 0, reason)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info."""
        return {"policy": "fixed", "nodes": self._budget.nodes, "depth": self._budget.depth}
