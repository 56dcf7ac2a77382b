"""How many draft tokens a step has, none included: the one place that decides.

One answer per step, for the whole batch: a plain step, or draft tokens of one shape. Of a drafter
that costs time, the shape that brings most tokens per millisecond (shapes.py). Of one that is free,
all that it knows. What was found on the host, by drafters and grammars, is then cut by score and
price: draft tokens are bought while they bring more tokens than their time would bring elsewhere,
at the speed that steps reach on average (Dinkelbach 1967: the maximum of a ratio of means).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.control import reasons
from forerun.control.acceptance import CERTAIN, Acceptance
from forerun.control.account import Account
from forerun.control.constants import (
    DECAY,
    FIRST_RATE,
    FIXED_MIN_PROB,
    LOSS_SHARE,
    MIN_PROB,
    MIN_REPEATS,
    PLAIN_EVERY,
    SPARING,
    STAKE,
    TRIAL,
)
from forerun.control.policy import Lookahead
from forerun.control.report import StepReport
from forerun.control.shapes import Found, Shapes, ranked
from forerun.control.step_costs import StepCosts
from forerun.interface.drafter import DrafterTraits
from forerun.interface.plan import Budget, Plan
from forerun.speculative.tree import NO_DRAFT, Draft
from forerun.types import Ints


class AdaptivePolicy:
    """Has draft tokens verified while they bring more than their time would bring elsewhere.

    costs      of steps, measured at start-up
    max_nodes, max_depth  draft tokens of a row, and of a path; a level has max_nodes / max_depth of
               them (one, for chains). Raises ValueError where that is none
    traits     of the drafter
    lookahead  of grammars; None without structured output
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
        losing = costs.in_round and traits.needs_features and not traits.free
        self.account = Account(costs, costs.in_round, traits.free, losing)
        self.acceptance = Acceptance(FIRST_RATE, traits.merged)
        self.shapes: Shapes | None = None
        if not traits.free:
            width = max_nodes // max_depth
            self.shapes = Shapes(costs, self.account, max_depth, width, losing)
        self.reasons: Counter[str] = Counter()
        self._nodes, self._depth, self._traits = max_nodes, max_depth, traits
        self._in_round, self._lookahead = costs.in_round, lookahead
        self._fault: str | None = None
        self._answer = Budget(0, 0, reasons.PLAIN)
        # Steps since draft tokens were verified, looked for, and not asked for at all.
        self._idle, self._looked, self._drafted, self._looks = 0, 0, 0, 0

    def open(self, slot: int) -> None:
        """See Policy."""
        self.acceptance.open(slot)
        if self.shapes is not None:
            self.shapes.open(slot)

    def disable(self, reason: str) -> None:
        """See Policy."""
        self._fault = reason

    def budget(self, slots: Ints, kv_len: Ints, constrained: bool = False) -> Budget:
        """See Policy."""
        budget = self._asked(slots, kv_len, constrained)
        if self._lookahead is not None and constrained:
            budget = self._with_known(budget, slots, kv_len)
        self._answer = budget
        return budget

    def price(self, kv_len: Ints) -> float:
        """What a draft token costs at least, in tokens of plain decoding, beside these rows.

        Times grow in straight lines between measured counts of nodes: it is cheapest at one of
        these, or as the first or the last.
        """
        rows, costs, cached = len(kv_len), self.account.costs, int(kv_len.sum())
        most = rows * (1 + self._nodes)
        plain = costs.one(rows, cached)
        counts = {rows + 1, most, *(n for n in costs.measured.nodes if rows < n < most)}
        return rows * min(
            (costs.one(n, cached * n // rows) / plain - 1.0) / (n - rows) for n in counts
        )

    def _asked(self, slots: Ints, kv_len: Ints, constrained: bool) -> Budget:
        """What the drafter is asked for."""
        account, shapes = self.account, self.shapes
        why = self._fault or (reasons.DISABLED if account.empty else None)
        # A new engine learns what plain steps take from plain steps: they are never too slow.
        losing = shapes is not None and shapes.losing
        # Where plain steps are carried, what they take is known of carried ones only.
        unknown = account.costs.known(len(slots)) < MIN_REPEATS
        unknown = unknown or not (account.sure or constrained)
        if shapes is not None and losing:
            unknown = not account.sure and not shapes.promising(len(slots))
        if why is None and (unknown or (self._drafted >= PLAIN_EVERY and not losing)):
            why = reasons.PLAIN
        if why is not None:
            return Budget(0, 0, why)
        if shapes is None:
            return self._all(kv_len)
        shape = shapes.choose(slots.tolist())
        if shape is not None:
            why = reasons.ON_LEVELS.format(shape.nodes)
            return Budget(*shape, why, model_depth=shape.depth)
        if self._traits.merged:
            return self._all(kv_len)
        return Budget(0, 0, reasons.WAITING if shapes.lost(slots.tolist()) else reasons.WRONG)

    def _all(self, kv_len: Ints) -> Budget:
        """All that a free drafter knows, where something of it may pay."""
        price = self.price(kv_len)
        if self._idle >= PLAIN_EVERY:
            return Budget(1, 1, reasons.PROBING, most_rows=-(-len(kv_len) // 8))
        if self.account.gain < 0.0 and not self._look_is_due(len(kv_len)):
            return Budget(0, 0, reasons.SELDOM)
        if price >= 1.0:
            return Budget(0, 0, reasons.TOO_DEAR)
        return Budget(self._nodes, self._depth, reasons.ON, min_prob=round(price, 2))

    def _look_is_due(self, rows: int) -> bool:
        """Whether to look although that lost lately: seldom; where dear, TRIAL rows in a row."""
        loss, steps = self.account.look_loss, max(TRIAL / rows, 2.0)
        if loss <= SPARING * LOSS_SHARE:
            return self._looked + 1 >= SPARING
        due = self._looked >= PLAIN_EVERY // 2 and self.account.covers(loss * steps)
        return due or 0 < self._looks < steps

    def _with_known(self, budget: Budget, slots: Ints, kv_len: Ints) -> Budget:
        """With room for what grammars know, as far as that pays."""
        assert self._lookahead is not None
        if self._in_round:
            rows = self._lookahead.predicted(slots, FIXED_MIN_PROB)
            return replace(budget, known=tuple(min(len(row), self._depth) for row in rows))
        plain = self.account.empty or budget.reason == reasons.PLAIN
        price = CERTAIN if plain else self.price(kv_len)
        rows = self._lookahead.predicted(slots, min(CERTAIN, max(MIN_PROB, price)))
        owners = [row for row, scores in enumerate(rows) for _ in scores]
        scores = [score for row in rows for score in row]
        bought, _ = self._bought(scores, owners, kv_len.tolist())
        counts = np.bincount([owners[i] for i in bought], minlength=len(slots))
        return replace(budget, known=tuple(counts.tolist()))

    def select(self, plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """Of all rows the draft tokens that pay: any path is kept down to where it stops to. In
        rounds all: what one row does not verify saves nothing.
        """
        if self._in_round:
            return drafts
        self._learn_free(plan, drafts)
        slots = plan.slots.tolist()
        drafts = [
            self.acceptance.believed(slot, draft) if len(draft) else draft
            for slot, draft in zip(slots, drafts, strict=True)
        ]
        if self._answer.reason == reasons.PROBING:
            return [draft if any(draft.score > 0.5) else NO_DRAFT for draft in drafts]
        bought = set(self._bought(*_scored(drafts), plan.kv_len.tolist())[0])
        kept, end = [], 0
        for draft in drafts:
            begin, end = end, end + len(draft)
            kept.append(cut(draft, [index in bought for index in range(begin, end)]))
        return kept

    def _learn_free(self, plan: Plan, drafts: list[Draft]) -> None:
        """What the draft tokens of free drafters alone would win, where they are asked with a
        draft model: what that has to beat.
        """
        if self.shapes is None or not self._traits.merged:
            return
        free = [draft if draft.free is None else draft.free for draft in drafts]
        _, won = self._bought(*_scored(free), plan.kv_len.tolist())
        won /= plan.rows
        self.shapes.floor += (1.0 - DECAY) * (1.0 + won - self.shapes.floor)

    def _bought(
        self, scores: list[float], owners: list[int], kv_len: list[int]
    ) -> tuple[Sequence[int], float]:
        """Which of the tokens with these chances of being right bring most beyond what their time
        would bring elsewhere, by index, of those that can be afforded if all that is not certain
        turns out wrong; and how many tokens that is. owners: the row of each. Of equals the first,
        so that parents stay with children.

        Plain Python: NumPy's calls, cold after a forward pass, take longer than the step can win.
        """
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        account, costs = self.account, self.account.costs
        rows, cached = len(kv_len), sum(kv_len)
        padded, behind = costs.measured.padded, cached
        layers = ranked(order, owners) if padded else [[index] for index in order]
        plain = costs.one(rows, cached)
        price, most_longer = (
            rows * max(1.0, account.speed),
            STAKE * max(account.credit, 0.0) * plain,
        )
        price *= account.late
        best, most, tokens, certain, certain_longest, nodes = 0, 0.0, 0.0, plain, plain, rows
        for number, layer in enumerate(layers, 1):
            cached += behind if padded else kv_len[owners[layer[0]]]
            nodes += rows if padded else 1
            tokens += sum(scores[index] for index in layer)
            time = costs.one(nodes, cached)
            longest = costs.at_most(nodes, cached, time)
            if min(scores[index] for index in layer) >= CERTAIN:
                certain, certain_longest = time, longest
            if time - certain > most_longer or longest - certain_longest > most_longer:
                break
            won = tokens - price * (time / plain - 1.0)
            if won > most:
                best, most = number, won
        return [index for layer in layers[:best] for index in layer], most

    def observe(self, report: StepReport) -> None:
        """See Policy."""
        allowed, verified = max(report.allowed), any(report.draft_tokens)
        self.reasons[self._answer.reason] += report.rows
        if allowed and not self._in_round:
            self.reasons[reasons.VERIFIED if verified else reasons.NOTHING_VERIFIED] += report.rows
        plain = self.account.plain_ms(report)
        self.account.observe(report)
        self._drafted = self._drafted + 1 if verified else 0
        probed = allowed and self._answer.reason == reasons.PROBING
        self._idle = 0 if verified or probed else self._idle + 1
        self._looked = 0 if allowed else self._looked + 1
        self._looks = self._looks + 1 if allowed else 0
        found = self._found(report) if allowed else []
        if self.shapes is not None and not report.prefill:
            asked = allowed and (not self._traits.merged or self._answer.model_depth)
            self.shapes.learn(report, bool(asked), found, plain)

    def _found(self, report: StepReport) -> list[Found]:
        """Of each row that had draft tokens, what came of them."""
        found = []
        columns = report.slots, report.tokens, report.draft_tokens
        for slot, tokens, draft_tokens in zip(*columns, strict=True):
            if not tokens:
                continue
            if self._in_round:  # Nobody saw what the device drafted by itself.
                if draft_tokens:
                    depth = -(-draft_tokens * self._depth // self._nodes)
                    found.append(Found(min(len(tokens), depth), len(tokens) - 1))
            elif (learned := self.acceptance.learn(slot, tokens)) is not None:
                found.append(Found(*learned))
        return found

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: what is chosen, how often, and on what ground."""
        return (
            {
                "policy": "adaptive",
                "first_draft_token_right": round(self.acceptance.first_rate, 3),
                "trust_in_scores": round(self.acceptance.shared_trust, 3),
                "reasons": dict(self.reasons),
            }
            | self.account.describe()
            | (self.shapes.describe() if self.shapes else {})
        )


def _scored(drafts: list[Draft]) -> tuple[list[float], list[int]]:
    """Scores of all draft tokens, and the row of each."""
    scores = [score for draft in drafts for score in draft.score.tolist()]
    return scores, [row for row, draft in enumerate(drafts) for _ in range(len(draft))]


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
