"""Extends a draft model by the tokens that it has not read yet: at once, or later in one pass.

A step that drafts on the device leaves nothing to do here. For a sequence without draft tokens the
model's input is only stored, which costs next to nothing; the model catches up when the sequence
may draft again, or when the ring of features is full.
"""

from collections.abc import Sequence

import numpy as np

from forerun.drafters.draft_passes import DraftPasses
from forerun.drafters.draft_state import DraftState
from forerun.interface.draft_model import DraftModelTraits
from forerun.interface.features import RING_TOKENS, FeatureRing, StepFeatures
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Bools, Ints

MAX_LAG = RING_TOKENS - 4
"""Most tokens a sequence may lag behind with its features stored; then the model must read them. A
few less than the ring holds, because rounds that have begun meanwhile store theirs too.
"""


class DeferredDraftExtend:
    """The tokens of each slot that the draft model has not read: steps only stored its input.
    `states` are those of all rows of a plan.

    begin  int32[S] position of the first such token; -1: there is none
    """

    def __init__(self, slots: int, passes: DraftPasses, traits: DraftModelTraits) -> None:
        self.begin: Ints = np.full(slots, -1, np.int32)
        self._passes, self._traits = passes, traits
        self._reads = traits.features.kind != "none"
        self._ring: FeatureRing | None = None

    def lag(self, plan: Plan) -> Ints:
        """Return int32[B]: how many tokens of each row are in pages but not read by the draft
        model.
        """
        begin = self.begin[plan.slots]
        return np.where(begin < 0, 0, plan.kv_len - begin)

    def defer_step(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> bool:
        """Store the tokens that a step adds to each row, if the model lags in every row already and
        the ring has room; then the step needs nothing else. Otherwise returns False and changes
        nothing; call `extend`.
        """
        begin = self.begin[plan.slots].tolist()
        if min(begin) < 0 or 0 in outcome.n_tokens.tolist():
            return False
        if self._reads:
            rows = zip(plan.kv_len.tolist(), outcome.committed(plan), begin, strict=True)
            full = any(length + count - first > MAX_LAG for length, count, first in rows)
            features = None if full else self._features(trees, outcome, range(plan.rows))
            if features is None:
                return False
            self._ring = features.store()
        return True

    def take(self, plan: Plan, rows: AnyArray, max_tokens: int) -> tuple[Ints, Ints]:
        """Remove the next deferred tokens of rows int[n] from the deferred ones, row after row, at
        most `max_tokens` in all. Returns int32[n], the position of each row's first one, and
        int32[n] counts.
        """
        slots, lag = plan.slots[rows], self.lag(plan)[rows]
        begin = self.begin[slots]
        ends = np.minimum(np.cumsum(lag), max_tokens)
        counts = np.diff(ends, prepend=0).astype(np.int32)
        self.begin[slots] = np.where(counts < lag, begin + counts, -1)
        return begin, counts

    def extend(
        self,
        plan: Plan,
        states: list[DraftState],
        trees: TreeBatch,
        outcome: Outcome,
        pending: Bools,
        idle: Bools,
    ) -> None:
        """Extend the model by what became permanent in the rows `pending`, bool[B]. Rows that lag
        already, and those that will probably not draft soon (`idle`, bool[B]), only store it.

        A prompt is never deferred, because its pages are shared. Pages of deferred text lack the
        draft's entries until the model catches up; a sequence that reuses them meanwhile gets
        slightly worse drafts.
        """
        counts = np.array(outcome.committed(plan), np.int32)
        lag = self.lag(plan)
        late: Bools = pending & (lag > 0)
        if (late & self._full(lag + counts)).any():
            self.catch_up(plan, states, np.flatnonzero(late), False)
            lag = self.lag(plan)
        short: Bools = np.array(plan.known_counts) == 1
        waits: Bools = pending & ~self._full(lag + counts) & ((lag > 0) | (idle & short))
        rows = np.flatnonzero(waits)
        if len(rows):
            features = self._features(trees, outcome, rows.tolist())
            self._ring = features.store() if features is not None else None
            fresh = rows[lag[rows] == 0]
            self.begin[plan.slots[fresh]] = plan.kv_len[fresh]
        rows = np.flatnonzero(pending & ~waits)
        if len(rows):
            features = self._features(trees, outcome, rows.tolist())
            kv_len = plan.kv_len[rows]
            self._passes.extend(plan, states, rows, kv_len, counts[rows], features, True)

    def catch_up(
        self, plan: Plan, states: list[DraftState], late: AnyArray, wants_candidates: bool
    ) -> None:
        """Extend those of the rows `late`, int[n], that lag behind, as many tokens at a time as the
        model takes.

        wants_candidates  store candidates for their next tokens
        """
        while len(late := late[self.begin[plan.slots[late]] >= 0]):
            begin, counts = self.take(plan, late, self._traits.max_nodes)
            nonempty = counts > 0
            rows, begin, counts = late[nonempty], begin[nonempty], counts[nonempty]
            features = None
            if self._ring is not None:
                behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                slots = np.repeat(plan.slots[rows], counts)
                features = self._ring.at(slots, np.repeat(begin, counts) + behind)
            self._passes.extend(plan, states, rows, begin, counts, features, wants_candidates)

    def _full(self, lag: Ints) -> Bools:
        """Return bool[B]: whether so many tokens int32[B] exceed the ring of features."""
        return (lag > MAX_LAG) & self._reads

    def _features(
        self, trees: TreeBatch, outcome: Outcome, rows: Sequence[int]
    ) -> StepFeatures | None:
        """Return the features of what became permanent of these rows, row after row."""
        if not self._reads or outcome.features is None:
            return None
        # Lists: NumPy's calls, cold after a forward pass, take longer.
        start, known, nodes = trees.start.tolist(), trees.known.tolist(), list[int]()
        for row in rows:
            nodes += range(start[row], start[row] + known[row])
            nodes += outcome.paths[row].tolist()
        return outcome.features.select(np.array(nodes, np.int32))
