"""JaxOverlapExecutor: rounds that begin before the record of the one before is read."""

import numpy as np

from forerun.executors.jax.batches import Batch
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.inputs import packed_carried
from forerun.executors.jax.step import Scores, asked_of, asked_rows, ran
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import CarriedPlan
from forerun.speculative.draft_tree import full_size
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


class JaxOverlapExecutor(JaxExecutor):
    """The JaxExecutor, and the OverlapExecutor contract on it."""

    def keep_state(self) -> bool:
        """Let rounds carry on from each other: what was compiled for others is forgotten."""
        self.programs.keep_state(*self._within)
        return True

    def carries(self, scores: Scores) -> bool:
        """As OverlapExecutor: no row's penalties count what the step says, no rounding can leave a
        choice to the host (top_p, accept thresholds), no grammar holds a row.
        """
        return self.programs.carries and scores is self._last and scores.carries

    def drafting(self, scores: Scores) -> Ints:
        """Slots of rows that the step drafts for."""
        nobody: Ints = scores.slots[:0]
        return nobody if scores.drafted is None else scores.slots[scores.drafted.rows]

    def carry(self, plan: CarriedPlan, draft_request: DraftRequest | None = None) -> Scores | None:
        """Begin a carried plan on what the running step leaves. None where no one round can."""
        width, levels = self._within
        depth = np.minimum(plan.max_depth, levels).tolist()
        bounds = zip(plan.max_nodes.tolist(), depth, strict=True)
        most = [min(nodes, full_size(width, deep)) for nodes, deep in bounds]
        size = self._buckets.round(plan.rows, 1 + max(most))
        known = plan.bounded()
        asked = asked_of(known, self._sampler, self._edits)
        if size is None or sum(len(edits) for _, edits in asked.values()) > self._edits:
            return None
        reach = np.minimum(
            plan.most_kv + 1 + plan.max_depth, np.maximum(plan.ends, plan.most_kv + 1)
        )
        self._check_reach(known, reach)
        every = np.ones(plan.rows, np.bool_)
        drafted = self._drafting(known, every, draft_request)
        rows = asked_rows(known, every, drafted)
        rows.temperature[:] = self._temperatures(plan.slots, asked)
        batch = Batch(size, False, tuple(range(plan.rows)), (), (0,))
        nowhere = np.zeros(0, np.int32)
        scores = Scores(plan.slots, True, [batch], [], nowhere, rows, asked, drafted)
        choosing = self._sampler.choosing
        given = packed_carried(batch, plan, choosing, rows, self._width, np.array(most, np.int32))
        self._round(scores, batch, given)
        self._steps += 1
        self._last = scores
        return scores

    def trees(self, scores: Scores) -> TreeBatch:
        """What a carried step ran. Waits for it."""
        return ran(scores)
