"""What a draft model has not read yet: it reads at once, or catches up later in one pass.

A step that drafts by itself leaves nothing here. Of a sequence that nobody wants draft tokens for,
what the model would read is only kept ("at zero the draft costs nothing"); it catches up when draft
tokens are asked for again, or when no more features can be kept.
"""

import numpy as np

from forerun.drafters.draft_passes import DraftPasses
from forerun.drafters.draft_state import DraftState
from forerun.interface.draft_model import DraftModelTraits
from forerun.interface.features import RING_TOKENS, FeatureRing, StepFeatures
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Bools, Ints

MAX_LAG = RING_TOKENS - 4
"""Tokens a sequence may lag behind with its features kept; then the model reads them, asked or not.
A few less than can be kept: rounds that have begun meanwhile write theirs too."""


class Backlog:
    """How far the draft model is behind the sequences: tokens of steps that only kept what it would
    read of them. `states` are those of all rows of a plan.

    begin  int32[S] position of the first token that it has not seen; -1: it has seen all
    """

    def __init__(self, slots: int, passes: DraftPasses, about: DraftModelTraits) -> None:
        self.begin: Ints = np.full(slots, -1, np.int32)
        self._passes, self._about = passes, about
        self._reads = about.features.kind != "none"
        self._kept: FeatureRing | None = None

    def lag(self, plan: Plan) -> Ints:
        """int32[B]: how many tokens of those in pages the model has not seen."""
        begin = self.begin[plan.slots]
        return np.where(begin < 0, 0, plan.kv_len - begin)

    def keep_one(self, plan: Plan, trees: TreeBatch, outcome: Outcome) -> bool:
        """Keep the token that a plain step adds to each row, where the model is behind with all of
        them already and has room: nothing else is to be done then. False, and nothing has changed,
        where that is not so (`extend`).
        """
        begin = self.begin[plan.slots]
        if begin.min() < 0 or not trees.decode_only or not outcome.n_tokens.all():
            return False
        if self._reads:
            if (plan.kv_len - begin).max() >= MAX_LAG or outcome.features is None:
                return False
            self._kept = outcome.features.keep()
        return True

    def take(self, plan: Plan, rows: AnyArray, most: int) -> tuple[Ints, Ints]:
        """Remove the first tokens of these rows, int[n], `most` in all, row after row: position of
        the first int32[n], and how many int32[n].
        """
        slots, lag = plan.slots[rows], self.lag(plan)[rows]
        begin = self.begin[slots]
        ends = np.minimum(np.cumsum(lag), most)
        counts = np.diff(ends, prepend=0).astype(np.int32)
        self.begin[slots] = np.where(counts < lag, begin + counts, -1)
        return begin, counts

    def extend(
        self,
        plan: Plan,
        states: list[DraftState],
        trees: TreeBatch,
        outcome: Outcome,
        left: Bools,
        idle: Bools,
    ) -> None:
        """Extend the model by what became permanent of the rows `left`, bool[B], or keep it: of a
        row that lags already, and where that is likely to be soon enough (idle, bool[B]).

        A prompt is never put off: its pages are shared. Pages of text that is put off lack the
        draft's entries until it catches up; who reuses them meanwhile is drafted for a bit worse.
        """
        counts = np.array(outcome.committed(plan), np.int32)
        lag = self.lag(plan)
        late: Bools = left & (lag > 0)
        if (late & self._full(lag + counts)).any():
            self.catch_up(plan, states, np.flatnonzero(late), False)
            lag = self.lag(plan)
        short: Bools = np.array(plan.known_counts) == 1
        waits: Bools = left & ~self._full(lag + counts) & ((lag > 0) | (idle & short))
        rows = np.flatnonzero(waits)
        if len(rows):
            features = self._features(trees, outcome, rows)
            self._kept = features.keep() if features is not None else None
            fresh = rows[lag[rows] == 0]
            self.begin[plan.slots[fresh]] = plan.kv_len[fresh]
        rows = np.flatnonzero(left & ~waits)
        if len(rows):
            features = self._features(trees, outcome, rows)
            kv_len = plan.kv_len[rows]
            self._passes.extend(plan, states, rows, kv_len, counts[rows], features, True)

    def catch_up(self, plan: Plan, states: list[DraftState], late: AnyArray, asked: bool) -> None:
        """Extend those of the rows `late`, int[n], that lag behind, as many tokens at a time as the
        model takes; asked: their candidates are wanted.
        """
        while len(late := late[self.begin[plan.slots[late]] >= 0]):
            begin, counts = self.take(plan, late, self._about.max_nodes)
            some = counts > 0
            rows, begin, counts = late[some], begin[some], counts[some]
            features = None
            if self._kept is not None:
                behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                slots = np.repeat(plan.slots[rows], counts)
                features = self._kept.at(slots, np.repeat(begin, counts) + behind)
            self._passes.extend(plan, states, rows, begin, counts, features, asked)

    def _full(self, lag: Ints) -> Bools:
        """bool[B] whether features of so many tokens int32[B] cannot be kept."""
        return (lag > MAX_LAG) & self._reads

    def _features(self, trees: TreeBatch, outcome: Outcome, rows: AnyArray) -> StepFeatures | None:
        """Those of what became permanent of these rows, row after row."""
        if not self._reads or outcome.features is None:
            return None
        if trees.decode_only:
            return outcome.features.select(rows)
        nodes = [outcome.permanent(trees, row) for row in rows.tolist()]
        return outcome.features.select(np.concatenate(nodes))
