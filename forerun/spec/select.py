"""Which of the proposed guesses are worth verifying, by the drafter's own estimates.

For drafters that cost next to nothing and say how likely their guesses are. They are asked
first and their guesses are ranked after, over all rows of the step.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from forerun.spec.costs import StepCosts
from forerun.spec.ledger import RESTING, Ledger
from forerun.spec.policy import Budget
from forerun.spec.tree import Draft
from forerun.types import AnyArray, Ints

DECAY = 0.97
"""What is left of an observation's weight after the next one of the sequence."""
SHARED_DECAY = 0.99
"""The same, for the estimate over all sequences that a new one starts with."""
PRIOR = 1.0
"""How many expected hits that estimate is worth to a new sequence."""
LOOK = 16
"""A row whose guesses do not pay is asked for them every so many steps, only to be compared
with what came; that costs the drafter's microseconds and no verification."""

MARGIN = 1.02
"""Guesses must promise at least this many times the speed of none: promises err."""
PRICED = 16
"""The price of a guess is reckoned every so many steps in which none was verified."""

ASKED = "the drafter is asked; guesses that pay are verified"
PROBING = "off, but measuring what a guess costs now"
LOOKING = "off, but looking whether the text has become easier"
PROBE = 64
"""After so many steps without a guess worth verifying, sequences with good ones verify one each:
what was measured at start-up may have been wrong."""

WRONG = "off: the guesses of this text are mostly wrong"
DEAR = "off: at this batch a guess costs as much as a token"
NO_MATCH = "nothing: nothing like the present came before"
NOT_WORTH = "nothing: the guesses found cost more than they bring"
PAYS = "guesses verified: they bring more than they cost"


@dataclass(slots=True)
class _Row:
    """What is known of the sequence in a slot.

    expected, hits  decayed: guesses the drafter expected to be right, and how many were
    offered         what the drafter proposed in the running step, before any was left out
    wait            steps until it is asked again, where it is not asked always
    """

    expected: float
    hits: float
    offered: Draft = field(default_factory=Draft)
    wait: int = 0


class SelectivePolicy:
    """Verifies the guesses that make expected tokens per millisecond of the step largest.

    The drafter's score of a guess is its estimate that the path to it is right. A sequence's
    trust is how often guesses were right over how often the drafter expected them to be, at
    most 1; a guess at depth d is worth score * trust**d tokens. Every proposal teaches, whether
    it was verified or not: what came is compared with what was proposed. So there is nothing
    to probe, and text that defies the drafter costs a few guesses per sequence, then none.
    """

    def __init__(self, costs: StepCosts, max_nodes: int, max_depth: int) -> None:
        if not 1 <= max_depth <= max_nodes:
            raise ValueError(f"need 1 <= max_depth <= max_nodes, not {max_depth} and {max_nodes}")
        self.ledger = Ledger(costs)
        self.chosen: Counter[str] = Counter()
        self._nodes, self._depth = max_nodes, max_depth
        self._rows: dict[int, _Row] = {}
        self._expected = self._hits = 10.0
        # What a guess cost when it was last reckoned, and for how many rows.
        self._price, self._priced = 0.0, 0
        # Steps since a guess was verified.
        self._idle = 0

    @property
    def shared(self) -> float:
        """The trust that a new sequence starts with."""
        return min(1.0, self._hits / self._expected)

    def open(self, slot: int) -> None:
        """Start from what other sequences taught."""
        self._rows[slot] = _Row(PRIOR, PRIOR * self.shared)

    def close(self, slot: int) -> None:
        """Forget the sequence."""
        self._rows.pop(slot, None)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """Whom to ask. `select` decides what becomes of the answers."""
        if len(slots) == 0:
            return []
        if self.ledger.resting:
            self.chosen[RESTING] += len(slots)
            return [Budget(0, 0, RESTING)] * len(slots)
        if self._idle % PRICED == 0 or len(slots) != self._priced:
            self._price, self._priced = self._least_price(kv_len), len(slots)
        return [self._ask(self._rows[slot], self._price) for slot in slots.tolist()]

    def select(self, slots: Ints, kv_len: Ints, drafts: list[Draft]) -> list[Draft]:
        """The guesses to verify, row by row: any path is kept down to where it stops to pay.

        slots int32[B] and kv_len int32[B] are those of all rows of the step.
        """
        counts, probing = [len(draft) for draft in drafts], self._probing
        self._idle += 1
        if not any(counts):
            return drafts
        worth = np.concatenate(
            [
                self._worth(slot, draft)
                for slot, draft, count in zip(slots.tolist(), drafts, counts, strict=True)
                if count
            ]
        )
        ranked = np.argsort(-worth, kind="stable")
        owners = np.repeat(np.arange(len(counts)), counts)
        cached = np.cumsum(np.append(kv_len.sum(), kv_len[owners[ranked]]))
        ms = self.ledger.costs.step_ms(len(counts) + np.arange(len(ranked) + 1), cached)
        tokens = len(counts) + np.append(0.0, np.cumsum(worth[ranked]))
        kept = np.zeros(len(worth), np.bool_)
        speed = tokens / ms
        best = int(np.argmax(speed))
        if speed[best] < MARGIN * speed[0]:
            best = 0
        best = len(ranked) if probing else best
        kept[ranked[:best]] = True
        if best and not probing:
            self._idle = 0
        ends = np.cumsum(counts).tolist()
        return [
            self._cut(draft, kept[end - count : end])
            for draft, count, end in zip(drafts, counts, ends, strict=True)
        ]

    def observe(self, slot: int, guesses: int, accepted: int) -> None:
        """Nothing: `learn` sees more."""

    def learn(self, slot: int, tokens: list[int]) -> None:
        """`tokens` came, at least one: compare them with what was proposed."""
        row = self._rows.get(slot)
        if row is None or not len(row.offered):
            return
        expected, hits = compare(row.offered, tokens)
        row.offered = Draft()
        row.expected = DECAY * row.expected + expected
        row.hits = DECAY * row.hits + hits
        self._expected = SHARED_DECAY * self._expected + expected
        self._hits = SHARED_DECAY * self._hits + hits
        if hits:
            # Easy text has to be noticed quickly.
            row.wait = 0

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info and statistics: what is chosen, how often, and on what ground."""
        return {
            "policy": "verify the guesses that pay, by the drafter's scores",
            "a_guess_costs": round(self._price, 3),
            "trust": round(self.shared, 3),
            "chosen": dict(self.chosen),
        } | self.ledger.describe()

    @property
    def _probing(self) -> bool:
        """True in a step that verifies guesses only to see what they cost."""
        return self._idle % PROBE == PROBE - 1

    def _least_price(self, kv_len: Ints) -> float:
        """What a guess costs in tokens, when as many are bought as makes them cheapest."""
        rows = len(kv_len)
        more = np.arange(rows * self._nodes + 1)
        cached = kv_len.sum() * (1.0 + more / rows)
        ms = self.ledger.costs.step_ms(rows + more, cached)
        each = (ms[1:] / ms[0] - 1.0) / more[1:]
        return float(rows * (each.min() + self.ledger.costs.measured.draft_ms / ms[0]))

    def _ask(self, row: _Row, price: float) -> Budget:
        """All that is allowed, or nothing where even a sure guess would not pay."""
        trust = min(1.0, row.hits / row.expected)
        facts = (round(price, 2), round(trust, 2))
        if self._probing and trust > 0.5:
            return _budget(1, 1, PROBING, facts)
        if trust > price:
            return _budget(self._nodes, self._depth, ASKED, facts)
        reason = DEAR if price >= 1.0 else WRONG
        row.wait -= 1
        if row.wait >= 0 or price >= 1.0:
            self.chosen[reason] += 1
            return _budget(0, 0, reason, facts)
        row.wait = LOOK
        return _budget(1, 1, LOOKING, facts)

    def _worth(self, slot: int, draft: Draft) -> AnyArray:
        """float64[K] tokens that each guess is expected to bring."""
        row = self._rows[slot]
        row.offered = draft
        trust = min(1.0, row.hits / row.expected)
        depth: list[int] = []
        for parent in draft.parents.tolist():
            depth.append(depth[parent] + 1 if parent >= 0 else 1)
        worth: AnyArray = draft.score * trust ** np.array(depth)
        return worth

    def _cut(self, draft: Draft, kept: AnyArray) -> Draft:
        """The guesses that are kept; every one's parent is."""
        left = int(kept.sum())
        self.chosen[PAYS if left else NOT_WORTH if len(draft) else NO_MATCH] += 1
        if left == len(draft):
            return draft
        # Where each kept guess stands now; one more at the end, so that -1 stays the root.
        place = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(-1))
        return Draft(draft.tokens[kept], place[draft.parents[kept]], draft.score[kept])


@lru_cache(maxsize=1024)  # Text is dear: rows of a step, and steps, mostly say the same.
def _budget(nodes: int, depth: int, reason: str, facts: tuple[float, float]) -> Budget:
    """facts: what a guess costs, in tokens, and the trust in the drafter."""
    price, trust = facts
    words = f"a guess costs {price:.2f} tokens and the drafter is trusted to {100 * trust:.0f} %"
    return Budget(nodes, depth, f"{words}: {reason}")


def compare(draft: Draft, tokens: list[int]) -> tuple[float, float]:
    """(hits the drafter expected, hits there were) along the path that `tokens` took.

    At every node on the path the guesses below it are, together, right or wrong.
    """
    below: dict[int, list[int]] = {}
    for index, parent in enumerate(draft.parents.tolist()):
        below.setdefault(parent, []).append(index)
    expected = hits = 0.0
    node, score = -1, 1.0
    for token in tokens:
        children = below.get(node, [])
        if not children:
            break
        expected += min(1.0, float(draft.score[children].sum()) / max(score, 1e-6))
        found = [child for child in children if draft.tokens[child] == token]
        if not found:
            break
        hits += 1.0
        node, score = found[0], float(draft.score[found[0]])
    return expected, hits
