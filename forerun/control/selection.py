"""Which of the proposed draft tokens are worth verifying, by the drafter's own estimates.

For drafters that cost next to nothing and say how likely their draft tokens are. They are asked
first and their draft tokens are ranked after, over all rows of the step.
"""

from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np

from forerun.control.cost_model import StepCosts
from forerun.control.draft_selector import DraftSelector
from forerun.control.policy import Budget
from forerun.control.slowdown_guard import DISABLED, SlowdownGuard
from forerun.speculative.tree import Draft
from forerun.types import Ints

LOOK = 16
"""A row whose draft tokens do not pay is asked for them every so many steps, only to be compared
with what came; that costs the drafter's microseconds and no verification."""

SPARING = 4
"""While speculation does not pay, it is looked for in every so manyth step only: looking costs some
microseconds a row, which is 3 % of a step of four rows on two cores."""

PRICED = 16
"""The price of a draft token is reckoned every so many steps."""

ASKED = "the drafter is asked; draft tokens that pay are verified"
PROBING = "off, but measuring what a draft token costs now"
SELDOM = "off: lately draft tokens won less than looking for them cost; one step in four looks"
PROBED = "off: this step measures, with others, what a draft token costs now"
LOOKING = "off, but looking whether the text has become easier"
PROBE = 128
"""After so many steps without a draft token worth verifying, some sequences with good ones verify
one each: what was measured at start-up may have been wrong."""
PROBES = 8
"""So many rows at most: beside 64 rows, 64 draft tokens would cost a step of their own."""

WRONG = "off: the draft tokens of this text are wrong too often for what they cost"
DEAR = "off: at this batch a draft token costs as much as a token"
NO_MATCH = "nothing: no continuation is likely enough"
NOT_WORTH = "nothing: the draft tokens found cost more than they bring"
PAYS = "draft tokens verified: they bring more than they cost"


class SelectivePolicy:
    """Asks the drafter wherever a sure draft token would pay, and leaves the rest to the selector.

    Since every proposal teaches, there is nothing to probe: text that defies the drafter costs
    a few draft tokens per sequence, then none.
    """

    def __init__(self, costs: StepCosts, max_nodes: int, max_depth: int) -> None:
        if not 1 <= max_depth <= max_nodes:
            raise ValueError(f"need 1 <= max_depth <= max_nodes, not {max_depth} and {max_nodes}")
        self.slowdown_guard = SlowdownGuard(costs)
        self.selector = DraftSelector(self.slowdown_guard)
        self.chosen: Counter[str] = Counter()
        self._nodes, self._depth = max_nodes, max_depth
        # By slot: steps until it is asked again, where it is not asked always.
        self._wait: dict[int, int] = {}
        # What a draft token cost when it was last reckoned, for how many rows, how many steps ago.
        self._price, self._priced, self._age = 0.0, 0, 0
        # Steps since a draft token was verified.
        self._idle = 0

    def open(self, slot: int) -> None:
        """A sequence took the slot."""
        self.selector.open(slot)
        self._wait[slot] = 0

    def close(self, slot: int) -> None:
        """Forget the sequence."""
        self.selector.close(slot)
        self._wait.pop(slot, None)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """Whom to ask. `select` decides what becomes of the answers."""
        if len(slots) == 0:
            return []
        if self.slowdown_guard.disabled:
            self.chosen[DISABLED] += len(slots)
            return [Budget(0, 0, DISABLED)] * len(slots)
        self._idle += 1
        if self._probing:
            return self._probes(slots)
        if self.slowdown_guard.gain_ema < 0.0 and self._idle % SPARING:
            self.chosen[SELDOM] += len(slots)
            return [Budget(0, 0, SELDOM)] * len(slots)
        self._age += 1
        if self._age > PRICED or len(slots) != self._priced:
            self._price, self._priced, self._age = self._min_price(kv_len), len(slots), 0
        if self._price >= 1.0:
            self.chosen[DEAR] += len(slots)
            facts = (round(self._price, 2), round(self.selector.shared, 2))
            return [_budget(0, 0, DEAR, facts)] * len(slots)
        return [self._ask(slot, self._price) for slot in slots.tolist()]

    def select(self, slots: Ints, kv_len: Ints, drafts: list[Draft]) -> list[Draft]:
        """The draft tokens to verify, row by row."""
        probing = self._probing
        kept = self.selector.select(slots, kv_len, drafts, everything=probing)
        if not probing and any(map(len, kept)):
            self._idle = 0
        for before, after in zip(drafts, kept, strict=True):
            self.chosen[PAYS if len(after) else NOT_WORTH if len(before) else NO_MATCH] += 1
        return kept

    def observe(self, slot: int, draft_tokens: int, accepted: int) -> None:
        """Nothing: `learn` sees more."""

    def learn(self, slot: int, tokens: list[int]) -> None:
        """`tokens` came, at least one: compare them with what was proposed."""
        if self.selector.learn(slot, tokens):
            # Easy text has to be noticed quickly.
            self._wait[slot] = 0

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info and statistics: what is chosen, how often, and on what ground."""
        return {
            "policy": "verify the draft tokens that pay, by the drafter's scores",
            "draft_token_price": round(self._price, 3),
            "trust": round(self.selector.shared, 3),
            "chosen": dict(self.chosen),
        } | self.slowdown_guard.describe()

    @property
    def _probing(self) -> bool:
        """True in a step that verifies draft tokens only to see what they cost."""
        return self._idle % PROBE == PROBE - 1

    def _min_price(self, kv_len: Ints) -> float:
        """What a draft token costs in tokens, when as many are bought as makes them cheapest."""
        rows = len(kv_len)
        more = np.arange(rows * self._nodes + 1)
        cached = kv_len.sum() * (1.0 + more / rows)
        ms = self.slowdown_guard.costs.step_ms(rows + more, cached)
        each = (ms[1:] / ms[0] - 1.0) / more[1:]
        return float(rows * (each.min() + self.slowdown_guard.costs.measured.draft_ms / ms[0]))

    def _probes(self, slots: Ints) -> list[Budget]:
        """One draft token each for a few rows with good ones; nothing else is verified."""
        budgets, left = [], PROBES
        for slot in slots.tolist():
            trust = self.selector.trust(slot)
            facts = (round(self._price, 2), round(trust, 2))
            if left and trust > 0.5:
                left -= 1
                budgets.append(_budget(1, 1, PROBING, facts))
            else:
                budgets.append(_budget(0, 0, PROBED, facts))
        return budgets

    def _ask(self, slot: int, price: float) -> Budget:
        """All that is allowed, or nothing where even a sure draft token would not pay."""
        trust = self.selector.trust(slot)
        facts = (round(price, 2), round(trust, 2))
        if trust > price:
            return _budget(self._nodes, self._depth, ASKED, facts)
        self._wait[slot] -= 1
        if self._wait[slot] >= 0:
            self.chosen[WRONG] += 1
            return _budget(0, 0, WRONG, facts)
        self._wait[slot] = LOOK
        return _budget(1, 1, LOOKING, facts)


@lru_cache(maxsize=1024)  # Text is dear: rows of a step, and steps, mostly say the same.
def _budget(nodes: int, depth: int, reason: str, facts: tuple[float, float]) -> Budget:
    """facts: what a draft token costs, in tokens, and the trust in the drafter."""
    price, trust = facts
    words = (
        f"a draft token costs {price:.2f} tokens and the drafter is trusted to {100 * trust:.0f} %"
    )
    # Where the least that a draft token can cost is known, one that promises less is not looked at.
    return Budget(nodes, depth, f"{words}: {reason}", min_prob=0.0 if reason == PROBING else price)
