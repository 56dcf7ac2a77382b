"""Decides how many draft tokens a step gets, possibly none. The scheduler may lower that (requests,
pages, room), and a native drafter selects by the same costs.

There is one decision per step, for the whole batch: a plain step, or draft tokens of one shape. A
drafter that takes time gets the shape that brings the most tokens per millisecond (shapes.py). A
drafter without a draft model proposes everything it finds. Proposals made on the host, by drafters
and grammars, are then cut by score and cost: draft tokens are selected while they bring more tokens
than their time would bring elsewhere, at the average speed of steps (Dinkelbach 1967: the maximum
of a ratio of means).
"""

from array import array
from collections import Counter
from functools import partial
from itertools import takewhile
from typing import Any

from forerun.control import reasons
from forerun.control.account import Account
from forerun.control.constants import LOSS_SHARE, MIN_REPEATS, PLAIN_EVERY, RETRY
from forerun.control.host_drafts import HostDrafts
from forerun.control.policy import FIXED_MIN_PROB, Budget, Decision, Lookahead, with_known
from forerun.control.report import StepReport
from forerun.control.shapes import Shapes
from forerun.control.step_costs import StepCosts
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import NodeCosts
from forerun.types import Ints


class AdaptivePolicy:
    """Verifies draft tokens while they bring more tokens than their time would bring elsewhere.

    costs      of steps, measured at start-up
    max_nodes, max_depth  draft tokens of a row, and of a path; a level has max_nodes / max_depth of
                          them (one, for chains). ValueError unless 1 <= max_depth <= max_nodes
    traits     of the drafter
    lookahead  of grammars; None without structured output

    since_allowed  steps since draft tokens were last allowed
    in_a_row       consecutive steps that verified some
    pause          steps until draft tokens that seem too expensive are tried again
    """

    def __init__(
        self,
        costs: StepCosts,
        max_nodes: int,
        max_depth: int,
        traits: DrafterTraits,
        lookahead: Lookahead | None = None,
    ) -> None:
        if not 1 <= max_depth <= max_nodes:
            raise ValueError(f"need 1 <= max_depth <= max_nodes, not {max_depth} and {max_nodes}")
        self.account = Account(costs, traits.merged)
        self.drafts = HostDrafts(self.account, max_nodes, traits.merged)
        self.shapes = None
        if not traits.no_draft_model:
            width = max_nodes // max_depth
            self.shapes = Shapes(self.account, self.drafts, max_depth, width, traits.merged)
        self.reasons: Counter[str] = Counter()
        self._nodes, self._depth = max_nodes, max_depth
        self._drafts_in_step, self._lookahead = costs.drafts_in_step, lookahead
        self._selects_by_cost = traits.selects_by_cost
        self._fault: str | None = None
        self.since_allowed, self.in_a_row, self.pause = 0, 0, int(RETRY)

    def disable(self, reason: str) -> None:
        """Implement Policy.disable."""
        self._fault = reason

    def decide(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Decision:
        """Implement Policy.decide."""
        rows, each = len(slots), kv_len.tolist()
        budget = self._budget(rows, sum(each), constrained)
        budgets, with_draft_model = (budget,) * rows, budget.model_depth > 0
        if budget.reason == reasons.PROBING:
            first = -(-rows // 8)
            budgets = (budget,) * first + (Budget(0, 0, reasons.PROBING),) * (rows - first)
        if self._lookahead is not None and constrained:
            if self._drafts_in_step:
                rows_known = self._lookahead.predicted(slots, FIXED_MIN_PROB)
                known = [min(len(row), self._depth) for row in rows_known]
            else:
                forced_only = budget.reason in (reasons.DISABLED, reasons.PLAIN)
                known = self.drafts.known(
                    self._lookahead, slots, each, forced_only, with_draft_model
                )
            budgets = with_known(budgets, known)
        if self._selects_by_cost and not constrained and not with_draft_model:
            node_costs = self._node_costs(rows, sum(each)) if budget.nodes else None
            return Decision(budget.reason, budgets, node_costs=node_costs)
        select = (
            None if self._drafts_in_step else partial(self.drafts.select, each, with_draft_model)
        )
        return Decision(budget.reason, budgets, select)

    def _budget(self, rows: int, cached: int, constrained: bool) -> Budget:
        """Return what the drafter may propose, for every row alike."""
        account = self.account
        # A new engine learns what plain steps take from plain steps: they are never too slow.
        can_carry = account.costs.seen(rows, True) > 0.0 and not constrained
        known = account.costs.seen(rows, can_carry) >= MIN_REPEATS
        if can_carry and not self.since_allowed and not self._drafts_in_step:
            # Plain steps after a search for draft tokens are not carried: they time such steps.
            known = known and account.costs.seen(rows, False) > 0.0
        empty = account.main.empty and account.model.empty
        off_reason = self._fault or (reasons.DISABLED if empty else None)
        plain_is_due = not known or account.in_doubt or self.in_a_row >= PLAIN_EVERY
        if off_reason or plain_is_due:
            return Budget(0, 0, off_reason or reasons.PLAIN)
        if self.shapes is not None and not account.model.empty:
            budget = self.shapes.budget(rows)
            if budget is not None:
                return budget
        if account.main.empty:
            return Budget(0, 0, reasons.DISABLED)
        return self._no_model_budget(rows, cached)

    def _no_model_budget(self, rows: int, cached: int) -> Budget:
        """Return the budget of a drafter without a draft model: everything it proposes, if some of
        it may pay. If none may, one draft token is tried now and then, since the costs may be
        wrong: soon at first, then less and less often.
        """
        curve = self.account.costs.curve(rows, rows * (1 + self._nodes), cached)
        if self.since_allowed >= (self.pause if curve.min_mean_cost >= 1.0 else PLAIN_EVERY):
            return Budget(1, 1, reasons.PROBING)
        returns = self.account.main.of(rows)
        if returns.speed < 1.0 and not self._search_is_due(returns.search.value):
            return Budget(0, 0, reasons.SELDOM)
        if curve.min_mean_cost >= 1.0:
            return Budget(0, 0, reasons.TOO_DEAR)
        return Budget(
            self._nodes, self._depth, reasons.ON, min_prob=round(curve.min_marginal_cost, 3)
        )

    def _search_is_due(self, cost: float) -> bool:
        """Return whether to search for draft tokens although searches lost time lately. cost: of
        one, in plain steps; they are so rare that they take a third of the allowed loss.
        """
        return self.since_allowed + 1 >= 3.0 * cost / LOSS_SHARE and self.account.main.covers(cost)

    def _node_costs(self, rows: int, cached: int) -> NodeCosts:
        """Return how many tokens 1, 2, ... draft tokens must bring for their time, for as many of
        them as the largest loss covers: the costs by which HostDrafts.select_nodes selects.
        """
        costs, max_loss = self.account.costs, self.account.main.max_loss
        added = costs.added_steps(rows, rows * (1 + self._nodes), cached)
        covered = takewhile(lambda each: each[1] <= max_loss, added)
        value = self.account.step_value(rows, cached, False)
        return NodeCosts(array("d", [value * more for more, _ in covered]), costs.measured.padded)

    def observe(self, report: StepReport) -> None:
        """Implement Policy.observe."""
        allowed, verified = max(report.allowed), any(report.draft_tokens)
        self.reasons[report.reason or reasons.PROMPTS] += report.rows
        if allowed and not self._drafts_in_step:
            self.reasons[reasons.VERIFIED if verified else reasons.NOTHING_VERIFIED] += report.rows
        ratio = self.account.observe(report, self.shapes.baseline.value if self.shapes else 1.0)
        self.in_a_row = self.in_a_row + 1 if verified else 0
        if report.reason == reasons.PROBING and verified:
            self.pause = min(2 * self.pause, PLAIN_EVERY)
        self.since_allowed = 0 if allowed else self.since_allowed + 1
        if self.shapes is not None:
            self.shapes.learn(report, ratio)
        elif allowed and not (self._selects_by_cost and not report.constrained):
            self.drafts.learn(report.proposed, report.tokens)

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: decisions, how often each, and the estimates they use."""
        return (
            {
                "policy": "adaptive",
                "trust_in_scores": round(self.drafts.calibration.share, 3),
                "reasons": dict(self.reasons),
            }
            | self.account.describe()
            | (self.shapes.describe() if self.shapes else {})
        )
