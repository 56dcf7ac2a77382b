"""The toy on a slow device: what is begun is done when somebody waits, and can be carried on."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.executors.device_choice import plain_nodes
from forerun.executors.toy import ToyExecutor
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch, batch


@dataclass(eq=False)
class Begun:
    """A step that has begun. scores: of one that the host decides; accepted: of any other, done."""

    number: int
    plan: Any
    trees: TreeBatch | None
    scores: Any = None
    accepted: Any = None


class CarryingToy(ToyExecutor):
    """A OverlapExecutor, fastidious about how it is used.

    The rows of a carried step are where its own `state` says, by slot: kv_len and last token.
    Pages are read and written when a step is done, which is late, so one that was given away too
    early is noticed.

    events  ("begin" | "carry" | "do" | "look", number of the step), in order
    fails   which of these fail
    """

    def __init__(self, limits, fails=()):
        super().__init__(limits)
        self.events, self.fails = [], set(fails)
        self._state, self._queue, self._count, self._drafter = {}, [], 0, None

    def guided_by(self, drafter):
        """Draft token what this drafter would; it is asked when it knows the text."""
        self._drafter = drafter
        drafts_on_device = drafter.traits.name not in ("none", "ngram")
        drafter.traits = replace(drafter.traits, drafts_on_device=drafts_on_device)

    def open(self, slot_init):
        self._no_step_has(slot_init.slot)
        super().open(slot_init)

    def close(self, slot):
        self._no_step_has(slot)
        super().close(slot)

    def keep_state(self):
        return True

    def carries(self, begun):
        return begun in self._queue

    def verify(self, plan, trees, draft_request=None):
        begun = self._begin("begin", plan, trees)
        decided = np.isin(trees.roots, plain_nodes(self._sampler.choosing, plan, trees).nodes).all()
        if decided and not self._sampler.reports(plan.slots) and trees.known.max() == 1:
            self._queue.append(begun)
        else:
            begun.scores = super().verify(plan, trees, draft_request)
        return begun

    def drafting(self, begun):
        return begun.plan.slots

    def carry(self, plan, draft_request=None):
        assert len(self._queue) == 1, "a step is carried on from one that runs, and no further"
        assert set(plan.slots.tolist()) <= set(self._queue[0].plan.slots.tolist())
        self._queue.append(self._begin("carry", plan, None))
        return self._queue[-1]

    def trees(self, begun):
        self._wait_for(begun)
        return begun.trees

    def accept(self, plan, trees, begun, masks):
        self._note("look", begun)
        self._wait_for(begun)
        if begun.scores is not None:
            return super().accept(plan, trees, begun.scores, masks)
        return begun.accepted

    def commit(self, plan, trees, begun, accepted):
        if begun.scores is not None:
            return super().commit(plan, trees, begun.scores, accepted)
        return self._sampler.outcome(plan, trees, accepted)

    def _begin(self, what, plan, trees):
        begun = Begun(self._count, plan, trees)
        self._count += 1
        self._note(what, begun)
        return begun

    def _note(self, what, begun):
        self.events.append((what, begun.number))
        if (what, begun.number) in self.fails:
            raise RuntimeError(f"{what} of step {begun.number} fails")

    def _no_step_has(self, slot):
        assert not any(slot in begun.plan.slots for begun in self._queue), "a step runs in the slot"

    def _wait_for(self, begun):
        while begun in self._queue:
            self._do(self._queue.pop(0))

    def _do(self, begun):
        self._note("do", begun)
        plan = begun.plan
        if begun.trees is None:
            plan = self._own(plan)
            begun.trees = batch(plan.known, self._drafter.propose(plan))
        scores = super().verify(plan, begun.trees)
        begun.accepted = super().accept(plan, begun.trees, scores, None)
        self._write(plan, begun.trees, begun.accepted)
        for row, slot in enumerate(plan.slots.tolist()):
            nodes = begun.trees.nodes(row)
            output_tokens = begun.accepted.choice[nodes.start : nodes.stop]
            output_tokens = output_tokens[output_tokens >= 0]
            self._state[slot] = int(plan.kv_len[row]) + len(output_tokens), int(output_tokens[-1])

    def _own(self, plan):
        """The plan, with what only the device knows."""
        kv_len, last = np.array([self._state[slot] for slot in plan.slots.tolist()], np.int32).T
        assert (kv_len <= plan.most_kv).all(), "more came than was thought possible"
        depth = np.minimum(plan.max_depth, plan.ends - kv_len - 1)
        return Plan(
            slots=plan.slots,
            kv_len=kv_len,
            known=tuple(last[:, None]),
            samples=np.ones(plan.rows, np.bool_),
            max_nodes=np.where(depth > 0, plan.max_nodes, 0).astype(np.int32),
            max_depth=np.maximum(depth, 0).astype(np.int32),
            page_table=plan.page_table,
            constrained=np.zeros(plan.rows, np.bool_),
        )
