"""How many draft tokens a sequence deserves now, zero included.

A draft token brings tokens if it is accepted and costs time whether it is or not. Both are
measured: the time of a step by its number of nodes at start-up, acceptance online, per sequence.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from forerun.control.cost_model import StepCosts
from forerun.control.draft_selector import DraftSelector
from forerun.control.slowdown_guard import DISABLED, SlowdownGuard
from forerun.speculative.tree import Draft
from forerun.types import AnyArray, Ints

DECAY = 0.95
"""What is left of an observation's weight after the next one."""
PRIOR = 0.7
"""Acceptance that is believed of the first level before anything was seen: optimistic."""
PRIOR_WEIGHT = 2.0
"""How many observations the prior, or the level above, is worth."""
SHARED_DECAY = 0.98
"""As DECAY, for the estimate over all sequences that a new one starts with."""
PROBE_SHARE = 0.015
"""Share of the time that may go into probing sequences whose speculation is off."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one row may draft in the next step, and why, in words for people.

    nodes   draft tokens at most
    depth   longest path of draft tokens
    min_prob  draft tokens less likely than this would not be verified
    """

    nodes: int
    depth: int
    reason: str
    min_prob: float = 0.0


class Policy(Protocol):
    """Chooses budgets and learns from what became of them."""

    def open(self, slot: int) -> None:
        """A sequence took the slot; forget its predecessor."""
        ...

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """One budget per row of the coming step: slots int32[B], cached tokens int32[B]."""
        ...

    def observe(self, slot: int, draft_tokens: int, accepted: int) -> None:
        """A step carried `draft_tokens` for the slot, of which `accepted` became output."""
        ...

    def close(self, slot: int) -> None:
        """The sequence left its slot."""
        ...


class DraftingPolicy(Policy, Protocol):
    """A policy that follows what steps cost, and may leave out draft tokens after seeing them."""

    slowdown_guard: SlowdownGuard

    def select(self, slots: Ints, kv_len: Ints, drafts: list[Draft]) -> list[Draft]:
        """What is worth verifying of `drafts`, one per row of the step."""
        ...

    def learn(self, slot: int, tokens: list[int]) -> None:
        """`tokens` came for the slot, at least one."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same budget always."""

    nodes: int
    depth: int

    def open(self, slot: int) -> None:
        """Nothing to remember."""

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """One and the same budget for every row."""
        return [Budget(self.nodes, self.depth, "fixed by the configuration")] * len(slots)

    def observe(self, slot: int, draft_tokens: int, accepted: int) -> None:
        """Nothing to learn."""

    def close(self, slot: int) -> None:
        """Nothing to forget."""


class AdaptivePolicy:
    """Maximises expected tokens per millisecond of the whole step.

    Draft tokens are bought in levels of max_nodes / max_depth draft tokens each (one, for chains).
    Level d of a row brings the tokens p_1 p_2 ... p_d, where p_i is the estimated chance that level
    i is accepted once level i - 1 is. Levels of all rows are ranked by what they bring; the step
    takes the best so many of them, where tokens over milliseconds is highest.
    A row that gets nothing is probed now and then with one level, so that it notices when its
    text becomes easy; the pause between probes follows from their cost and PROBE_SHARE.
    """

    def __init__(self, costs: StepCosts, max_nodes: int, max_depth: int) -> None:
        if not 1 <= max_depth <= max_nodes:
            raise ValueError(f"need 1 <= max_depth <= max_nodes, not {max_depth} and {max_nodes}")
        self.slowdown_guard = SlowdownGuard(costs)
        self.selector = DraftSelector(self.slowdown_guard)
        self.chosen: Counter[str] = Counter()
        self._levels = max_depth
        self._width = max_nodes // max_depth
        self._shared = PRIOR
        # Per slot and level, decayed: how often it was tried and how often accepted.
        self._tries = np.zeros((0, max_depth))
        self._hits = np.zeros((0, max_depth))
        # Per slot: levels given in the last step, and steps since one was tried.
        self._given = np.zeros(0, np.int64)
        self._pause = np.zeros(0)

    def open(self, slot: int) -> None:
        """Start from what other sequences saw lately, and be due for a probe."""
        missing = max(slot + 1 - len(self._given), 0)
        self._tries = np.pad(self._tries, ((0, missing), (0, 0)))
        self._hits = np.pad(self._hits, ((0, missing), (0, 0)))
        self._given = np.pad(self._given, (0, missing))
        self._pause = np.pad(self._pause, (0, missing))
        self._tries[slot], self._hits[slot], self._given[slot] = 0.0, 0.0, 0
        self._tries[slot, 0], self._hits[slot, 0] = PRIOR_WEIGHT, PRIOR_WEIGHT * self._shared
        self._pause[slot] = np.inf
        self.selector.open(slot)

    def budgets(self, slots: Ints, kv_len: Ints) -> list[Budget]:
        """See the class."""
        rows = len(slots)
        if self.slowdown_guard.disabled:
            self.chosen[DISABLED] += rows
            self._given[slots] = 0
            return [Budget(0, 0, DISABLED)] * rows
        if rows == 0:
            return []
        rates = self._rates(slots)
        # Tokens each level would bring; they fall along a row, so selector keeps levels in order.
        gains = np.cumprod(rates, axis=1).reshape(-1)
        ranked = np.argsort(-gains, kind="stable")
        tokens = rows + np.append(0.0, np.cumsum(gains[ranked]))
        spent = self._step_ms(kv_len, ranked // self._levels)
        bought = ranked[: int(np.argmax(tokens / spent))]
        levels = np.bincount(bought // self._levels, minlength=rows)
        # All rows that are off may probe, so each waits `rows` times as long as one alone.
        dearer = float(spent[1] / spent[0])
        due = self._pause[slots] > rows * (dearer - 1.0) / PROBE_SHARE
        can_pay = np.any((rows + np.arange(len(spent))) / spent > rows / spent[0])
        probe = (levels == 0) & due & can_pay
        self._given[slots] = np.where(probe, 1, levels)
        self._pause[slots] = np.where(levels > 0, 0.0, self._pause[slots] + 1.0)
        price = f"t({rows + self._width})/t({rows})={dearer:.2f}"
        percent = np.rint(100.0 * rates[:, 0]).astype(np.int64)
        columns = (self._given[slots].tolist(), probe.tolist(), percent.tolist())
        budgets = [_budget(self._width, price, *row) for row in zip(*columns, strict=True)]
        self.chosen.update(budget.reason.partition(": ")[2] for budget in budgets)
        return budgets

    def select(self, slots: Ints, kv_len: Ints, drafts: list[Draft]) -> list[Draft]:
        """Those that pay, now that the drafter has said how sure it is of each."""
        return self.selector.select(slots, kv_len, drafts)

    def learn(self, slot: int, tokens: list[int]) -> None:
        """`tokens` came, at least one: compare them with what was proposed."""
        self.selector.learn(slot, tokens)

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info and statistics: what is chosen, how often, and on what ground."""
        return {
            "policy": "ask for as many draft tokens as pay, by the acceptance of late",
            "acceptance": round(self._shared, 3),
            "trust": round(self.selector.shared, 3),
            "chosen": dict(self.chosen),
        } | self.slowdown_guard.describe()

    def observe(self, slot: int, draft_tokens: int, accepted: int) -> None:
        """Learn from a step that carried draft tokens; one without any says nothing."""
        if draft_tokens == 0:
            return
        tried = max(min(draft_tokens, int(self._given[slot])), 1)
        # Levels not tried fade too: what was seen of them long ago must not forbid them.
        self._hits[slot] *= DECAY
        self._tries[slot] *= DECAY
        self._hits[slot, : min(tried, accepted)] += 1.0
        self._tries[slot, : min(tried, accepted + 1)] += 1.0
        self._shared += (1.0 - SHARED_DECAY) * ((accepted > 0) - self._shared)
        # A probe that succeeds is repeated at once: easy text has to be believed quickly.
        self._pause[slot] = np.inf if accepted else 0.0

    def close(self, slot: int) -> None:
        """Forget the sequence."""
        self.selector.close(slot)

    def _rates(self, slots: Ints) -> AnyArray:
        """float64[B,levels]: chance of each level given the one above; unseen: as above."""
        hits, tries = self._hits[slots], self._tries[slots]
        rates = np.empty_like(hits)
        rates[:, 0] = hits[:, 0] / tries[:, 0]
        for level in range(1, self._levels):
            prior = PRIOR_WEIGHT * rates[:, level - 1]
            rates[:, level] = (prior + hits[:, level]) / (PRIOR_WEIGHT + tries[:, level])
        return rates

    def _step_ms(self, kv_len: Ints, owners: AnyArray) -> AnyArray:
        """float64[n+1]: milliseconds of a step with no level, the first, the first two, ...

        kv_len int32[B]; owners int[n] is the row of each level.
        """
        costs = self.slowdown_guard.costs
        draft_tokens = self._width * np.arange(len(owners) + 1)
        cached = np.cumsum(np.append(kv_len.sum(), self._width * kv_len[owners]))
        verifying = costs.step_ms(len(kv_len) + draft_tokens, cached)
        drafting = (
            costs.measured.follow_ms * (draft_tokens > 0) + costs.measured.draft_ms * draft_tokens
        )
        ms: AnyArray = verifying + costs.slowdown * drafting
        return ms


@lru_cache(maxsize=1024)  # Text is dear: rows of a step, and steps, mostly say the same.
def _budget(width: int, price: str, levels: int, probing: bool, percent: int) -> Budget:
    nodes, facts = levels * width, f"{price} and acceptance {percent} %"
    if probing:
        return Budget(nodes, levels, f"{facts}: off, but probing")
    if levels == 0:
        return Budget(0, 0, f"{facts}: a draft token costs more than it brings")
    return Budget(nodes, levels, f"{facts}: speculation pays up to {nodes}")
