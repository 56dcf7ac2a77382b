"""The toy on a slow device: what is begun is done when somebody waits, and can be gone on from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from forerun.executors.device_choice import device_nodes
from forerun.executors.toy import ToyExecutor, ToyPages
from forerun.interface.executor import Capabilities
from forerun.interface.plan import Round
from forerun.speculative.tree import batch


@dataclass(eq=False)
class Slow(Round):
    """A round that has begun. inner: of the toy, when it is done."""

    number: int = 0
    ends: np.ndarray | None = None
    inner: Round | None = None


@dataclass(frozen=True)
class InOrder(ToyPages):
    """Pages that are written behind the rounds that have begun, as by a device's queue."""

    before: Callable[[], None]

    def write_page(self, page, content):
        self.before()
        super().write_page(page, content)


class CarryingToy(ToyExecutor):
    """An Executor with overlap, fastidious about how it is used.

    The rows of a carried step are where its own `state` says, by slot: kv_len and last token.
    Pages are read and written when a step is done, which is late, so one that was given away too
    early is noticed.

    events  ("begin" | "carry" | "do" | "look", number of the step), in order
    fails   which of these fail
    """

    capabilities = Capabilities(overlap=True, drafts=True)

    def __init__(self, limits, fails=()):
        super().__init__(limits)
        self.events, self.fails = [], set(fails)
        self._state, self._queue, self._count, self._drafter = {}, [], 0, None
        self.pages = InOrder(self._keys, self._values, self._do_all)

    def guided_by(self, drafter):
        """Propose what this drafter would, once it knows the text."""
        self._drafter = drafter
        drafts_on_device = drafter.traits.name not in ("none", "ngram")
        drafter.traits = replace(drafter.traits, drafts_on_device=drafts_on_device)

    def open(self, slot_init):
        self._no_step_has(slot_init.slot)
        super().open(slot_init)

    def copy_page(self, source, target):
        assert not self._queue, "a page is copied while a step runs"
        return super().copy_page(source, target)

    def close(self, slot):
        self._no_step_has(slot)
        super().close(slot)

    def begin(self, plan, trees, masks=None):
        round = self._begun("begin", plan, trees=trees)
        nodes = device_nodes(self._sampler.choosing, plan, trees).nodes
        decided = np.isin(trees.roots, nodes).all() and trees.known.max() == 1
        round.can_overlap = bool(decided) and not self._sampler.reports(plan.slots)
        if round.can_overlap:
            self._queue.append(round)
        else:
            round.inner = super().begin(plan, trees)
        return round

    def begin_after(self, running, plan, ends):
        round = self._begun("carry", plan, previous=running, ends=ends, can_overlap=True)
        left = [] if running.inner else [running]
        assert self._queue == left, "it goes on from one that runs, and no further"
        assert set(plan.slots.tolist()) <= set(running.plan.slots.tolist())
        self._queue.append(round)
        return round

    def _begun(self, what, plan, **more):
        round = Slow(plan, drafting=plan.slots, number=self._count, **more)
        self._count += 1
        self._note(what, round)
        return round

    def finish(self, round, masks=None):
        while round in self._queue:
            self._do(self._queue.pop(0))
        self._note("look", round)
        if not round.can_overlap:
            round.outcome = super().finish(round.inner, masks)
        if round.previous is not None:
            round.complete_plan()
            assert round.plan.kv_len.tolist() == round.inner.plan.kv_len.tolist()
        round.outcome, round.hidden = round.inner.outcome, round.inner.hidden
        return round.outcome

    def _note(self, what, round):
        self.events.append((what, round.number))
        if (what, round.number) in self.fails:
            raise RuntimeError(f"{what} of step {round.number} fails")

    def _no_step_has(self, slot):
        assert not any(slot in round.plan.slots for round in self._queue), "a step runs in the slot"

    def _do_all(self):
        while self._queue:
            self._do(self._queue.pop(0))

    def _do(self, round):
        self._note("do", round)
        plan = round.plan
        if round.previous is not None:
            plan = self._own(plan, round.ends)
            round.trees = batch(plan.known, self._drafter.propose(plan))
        round.inner = super().begin(plan, round.trees)
        outcome = super().finish(round.inner)
        for row, slot in enumerate(plan.slots.tolist()):
            emitted = outcome.output_tokens[row]
            self._state[slot] = int(plan.kv_len[row]) + len(emitted), emitted[-1]

    def _own(self, plan, ends):
        """The plan, with what only the device knows."""
        kv_len, last = np.array([self._state[slot] for slot in plan.slots.tolist()], np.int32).T
        assert (kv_len <= plan.kv_len).all(), "more came than was thought possible"
        depth = np.minimum(plan.max_depth, ends - kv_len - 1)
        return replace(
            plan,
            kv_len=kv_len,
            known=tuple(last[:, None]),
            max_nodes=np.where(depth > 0, plan.max_nodes, 0).astype(np.int32),
            max_depth=np.maximum(depth, 0).astype(np.int32),
        )
