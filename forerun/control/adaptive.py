"""How many draft tokens each row gets in this step, zero included: the one place that decides.

Draft tokens are bought while they bring more tokens than the time they take would bring elsewhere,
at the speed that steps reach on average. (Of a ratio of means, tokens over time, that is the
maximum: Dinkelbach 1967.) It is the same for whatever may be drafted: proposals, levels that a
draft model may be asked for, tokens that a grammar forces or makes likely.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from forerun.control import reasons
from forerun.control.acceptance import CERTAIN, Acceptance
from forerun.control.constants import (
    LOOK_EVERY,
    MIN_PROB,
    MIN_REPEATS,
    PROBE_EVERY,
    PROBE_ROWS,
    SPARING,
)
from forerun.control.levels import LevelBudgets
from forerun.control.policy import Budget, Lookahead, widened
from forerun.control.report import StepReport
from forerun.control.slowdown_guard import SlowdownGuard
from forerun.control.step_costs import StepCosts
from forerun.interface.plan import Plan
from forerun.speculative.tree import NO_DRAFT, Draft
from forerun.types import Ints


class AdaptivePolicy:
    """Buys draft tokens while they bring more than their time would bring elsewhere.

    A drafter that costs nothing is asked for all it knows, and chosen from afterwards. One that
    costs time is asked for as many levels as should pay, by what came of earlier ones, or for one
    draft token (levels.py); a level has max_nodes / max_depth draft tokens (one, for chains). Where
    both draft one tree, levels of that are bought where they win more than the free one does alone.

    costs         of steps, measured at start-up
    free, merged  see DrafterTraits
    lookahead     of grammars; None without structured output
    """

    def __init__(
        self,
        costs: StepCosts,
        max_nodes: int,
        max_depth: int,
        free: bool = False,
        lookahead: Lookahead | None = None,
        merged: bool = False,
    ) -> None:
        if not 1 <= max_depth <= max_nodes:
            raise ValueError(f"need 1 <= max_depth <= max_nodes, not {max_depth} and {max_nodes}")
        self.guard = SlowdownGuard(costs, free)
        self.acceptance = Acceptance(0 if free else max_depth, merged)
        width = max_nodes // max_depth
        self._levels = None if free else LevelBudgets(self.guard, self.acceptance, width)
        self.reasons: Counter[str] = Counter()
        self._nodes, self._depth, self._width = max_nodes, max_depth, width
        self._merged, self._lookahead = merged, lookahead
        self._fault: str | None = None
        # Steps so far, and by slot the last one in which it had draft tokens, or wrong ones.
        self._step = 0
        self._tried: dict[int, float] = {}
        # The price of a draft token, for how many rows, and how many steps ago it was worked out.
        self._price, self._priced, self._age = 0.0, 0, 0
        # Steps since a draft token was verified, and since one was plain.
        self._idle, self._drafted, self._probing = 0, 0, False
        self._plain = 0  # So many steps from now on are plain.

    def open(self, slot: int) -> None:
        """Start from what others taught; be asked at once, beside free drafters when due."""
        self.acceptance.open(slot)
        if self._levels is not None:
            self._levels.open(slot)
        self._tried[slot] = self._tried.get(slot, self._step) if self._merged else -np.inf

    def disable(self, reason: str) -> None:
        """Nothing but what grammars know from now on."""
        self._fault = reason

    def budgets(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> list[Budget]:
        """See the class; and room for what a grammar knows, as far as that pays."""
        if len(slots) == 0:
            return []
        budgets = self._asked(slots, kv_len)
        alike = len(slots) if budgets.count(budgets[0]) == len(slots) else 1
        for budget in budgets[::alike]:
            self.reasons[budget.reason.partition(" (")[0]] += alike
        if self._lookahead is None or not constrained:
            return budgets
        paused = self.guard.disabled or budgets[0].reason == reasons.PLAIN
        price = CERTAIN if paused else self.price(kv_len)
        found = self._lookahead.predicted(slots, min(CERTAIN, max(MIN_PROB, price)))
        owners = [row for row, scores in enumerate(found) for _ in scores]
        bought, _ = self._bought([score for scores in found for score in scores], owners, kv_len)
        return widened(budgets, np.bincount([owners[i] for i in bought], minlength=len(slots)))

    def price(self, kv_len: Ints) -> float:
        """What a draft token costs at least, in tokens of plain decoding, beside these rows:
        one that promises less is not worth looking for.

        Times grow in straight lines between the measured counts of nodes, so one of these, or the
        first or the last draft token, is where a draft token is cheapest.
        """
        rows = len(kv_len)
        self._age += 1
        if self._age > LOOK_EVERY or rows != self._priced:
            costs, seen, most = self.guard.costs, int(kv_len.sum()), rows * (1 + self._nodes)
            plain = costs.one(rows, seen)
            counts = {rows + 1, most, *(n for n in costs.measured.nodes if rows < n < most)}
            cheapest = min(
                (costs.one(n, seen * n // rows) / plain - 1.0) / (n - rows) for n in counts
            )
            self._price, self._priced, self._age = rows * cheapest, rows, 0
        return self._price

    def _asked(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """What the drafter is asked for."""
        self._step, self._probing = self._step + 1, False
        why = self._fault or (reasons.DISABLED if self.guard.disabled else None)
        # A new engine learns what plain steps take from plain steps: they are never too slow.
        unknown = self.guard.costs.known(len(slots)) < MIN_REPEATS
        if why is None and (unknown or self._drafted >= PROBE_EVERY):
            self._plain = 1 if self._levels is not None else self.guard.plain_at_once
        if why is None and self._plain:
            self._plain, why = self._plain - 1, reasons.PLAIN
        if why is not None:
            return [Budget(0, 0, why)] * len(slots)
        if self._levels is None:
            return self._choices(slots, kv_len)
        levels = self._levels.budgets(slots, kv_len, self._step, self._tried)
        free = self._choices(slots, kv_len) if self._merged else levels
        return [a if a.nodes else b for a, b in zip(levels, free, strict=True)]

    def _choices(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """All that a free drafter knows, where something of it may pay."""
        self._idle += 1
        price = self.price(kv_len)
        if self._idle % PROBE_EVERY == 0:
            self._probing = True
            return self._probes(slots)
        if self.guard.gain < 0.0 and self._idle % SPARING:
            return [Budget(0, 0, reasons.SELDOM)] * len(slots)
        if price >= 1.0:
            return [_budget(0, 0, 0.0, reasons.ABOUT_DEAR, round(price, 1))] * len(slots)
        least, trust = round(price, 2), self.acceptance.trust
        everything = _budget(self._nodes, self._depth, least, reasons.ABOUT_ON, 100 * least)
        return [
            everything if trust(slot) > price else self._doubted(slot, price)
            for slot in slots.tolist()
        ]

    def _doubted(self, slot: int, price: float) -> Budget:
        """Where even a draft token that the drafter is sure of would not pay."""
        if self._step - self._tried[slot] <= LOOK_EVERY:
            facts = round(100 * self.acceptance.trust(slot)), round(100 * price)
            return _budget(0, 0, 0.0, reasons.ABOUT_WRONG, *facts)
        self._tried[slot] = self._step
        return Budget(1, 1, reasons.LOOKING, price)

    def _probes(self, slots: Ints) -> list[Budget]:
        """One draft token each for a few rows, more often right than not; nothing else."""
        good = [row for row, slot in enumerate(slots.tolist()) if self.acceptance.trust(slot) > 0.5]
        budgets = [Budget(0, 0, reasons.PAUSED)] * len(slots)
        for row in good[:PROBE_ROWS]:
            budgets[row] = Budget(1, 1, reasons.PROBING)
        return budgets

    def calibrate(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """Scores times the trust in them, level by level; they are compared with what comes."""
        if self._merged and self._levels is not None:
            self._levels.learn_free(drafts, partial(self._bought, kv_len=plan.kv_len))
        return [
            self.acceptance.calibrated(slot, draft) if len(draft) else draft
            for slot, draft in zip(plan.slots.tolist(), drafts, strict=True)
        ]

    def select(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """Of all rows the draft tokens that pay: any path is kept down to where it stops to."""
        owners = [row for row, draft in enumerate(drafts) for _ in range(len(draft))]
        kept = drafts
        if owners and not self._probing:
            scores = [score for draft in drafts for score in draft.score.tolist()]
            bought = set(self._bought(scores, owners, plan.kv_len)[0])
            self._idle = 0 if bought else self._idle
            kept, end = [], 0
            for draft in drafts:
                begin, end = end, end + len(draft)
                kept.append(cut(draft, [index in bought for index in range(begin, end)]))
        for allowed, before, after in zip(plan.max_nodes.tolist(), drafts, kept, strict=True):
            if allowed:
                found = reasons.NOT_WORTH if len(before) else reasons.NOTHING_FOUND
                self.reasons[reasons.VERIFIED if len(after) else found] += 1
        return kept

    def _bought(
        self, scores: list[float], owners: list[int], kv_len: Ints
    ) -> tuple[list[int], float]:
        """Which of the tokens with these chances of being right to verify, by index, and what they
        win; owners: the row of each. Of equals the first, so that parents stay with children.

        Plain Python: NumPy's calls, cold after a forward pass, take longer than the step can win.
        """
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        costs, lengths = self.guard.costs, kv_len.tolist()
        rows, seen = len(lengths), sum(lengths)

        def times() -> Iterable[tuple[float, float]]:
            cached = seen
            for number, index in enumerate(order, 1):
                cached += lengths[owners[index]]
                ms = costs.one(rows + number, cached)
                yield ms, costs.at_most(rows + number, cached, ms)

        worth = [scores[index] for index in order]
        count, won = self.guard.worthwhile(worth, times(), costs.one(rows, seen), rows)
        return order[:count], won

    def observe(self, report: StepReport) -> None:
        """Learn what the step cost, and of every row what its draft tokens were worth."""
        self.guard.observe(report)
        self._drafted = self._drafted + 1 if any(report.draft_tokens) else 0
        if not any(report.allowed):
            return
        columns = report.slots, report.tokens, report.draft_tokens, report.allowed
        for slot, tokens, draft_tokens, allowed in zip(*columns, strict=True):
            if not tokens:
                continue
            blind = draft_tokens if report.carried else 0
            modelled = self.acceptance.modelled(slot)
            right = self.acceptance.learn(slot, tokens, blind, modelled * allowed // self._width)
            if right is None or not modelled:
                continue
            self._tried[slot] = -np.inf if right else self._step
            if self._levels is not None:
                self._levels.learn(slot, allowed, right)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: what is chosen, how often, and on what ground."""
        return {
            "policy": "adaptive",
            "first_draft_token_right": round(self.acceptance.first_rate, 3),
            "trust_in_scores": round(self.acceptance.shared_trust, 3),
            "reasons": dict(self.reasons),
        } | self.guard.describe()


def cut(draft: Draft, kept: list[bool]) -> Draft:
    """The draft tokens that are kept; every one's parent is."""
    if all(kept):
        return draft
    if not any(kept):
        return NO_DRAFT
    keep = np.array(kept)
    place = np.append(np.cumsum(keep, dtype=np.int32) - 1, np.int32(-1))
    parents = place[draft.parents[keep]]
    return Draft(draft.tokens[keep], parents, draft.score[keep], draft.source_of(keep))


@lru_cache(maxsize=4096)
def _budget(nodes: int, depth: int, min_prob: float, text: str, *numbers: float) -> Budget:
    """A budget with a reason of this text and numbers: text takes long to make, and rows of a
    step, and steps, mostly say the same.
    """
    return Budget(nodes, depth, text.format(*numbers), min_prob)
