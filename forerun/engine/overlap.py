"""Overlap: the next step begins before the running one is looked at.

Without it the device waits while the host looks at an outcome, tells the news and plans. With it
the host does that for step n while step n+1 runs:

    device     | step n            | step n+1          | step n+2
    host        plan n+1 | look n   plan n+2 | look n+1

What step n+1 needs of step n stays on the device. The host plans it from bounds: as if every
draft token of step n were right, so that each position that can come has its page. Nothing else
about an outcome changes but that it is known one step later. So a row that ended in step n runs in
step n+1 too: what comes of that is dropped, and slot and pages are given back when it is over.

Where the host has a say - a prompt, a grammar, penalties, reports, draft tokens from the text,
somebody waiting for a free slot, too few pages - step n is looked at first, as without overlap.
"""

import logging
from dataclasses import dataclass, replace
from time import monotonic, perf_counter

import numpy as np

from forerun.engine.metrics import Metrics
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.sequence import Sequence
from forerun.interface.drafter import Drafter
from forerun.interface.executor import Executor, OverlapExecutor, Scores
from forerun.interface.plan import Outcome, Plan
from forerun.speculative.tree import TreeBatch

log = logging.getLogger("forerun.engine")


@dataclass(slots=True)
class Running:
    """A step that has begun.

    plan   the schedule's; of a carried step, completed as soon as the step before is known
    trees  None: a carried step's, which only the device knows yet
    since  when it was begun (monotonic)
    ms     how long it took, once it is over
    """

    schedule: Schedule
    plan: Plan
    trees: TreeBatch | None
    scores: Scores
    since: float
    ms: float = 0.0


class Overlap:
    """Keeps the running step, where one may run while the host does something else.

    executor  None: there is no overlap, every step is looked at when it has begun
    metrics   count carried steps, and the seconds of waiting for them
    running   the step that has begun and was not looked at; None between other steps
    """

    def __init__(
        self,
        executor: OverlapExecutor | None,
        drafter: Drafter,
        scheduler: Scheduler,
        metrics: Metrics,
    ) -> None:
        self._executor, self._drafter, self._scheduler = executor, drafter, scheduler
        self._metrics = metrics
        self.running: Running | None = None
        # Of the running step: slots, and positions that it may make permanent in each.
        self._grows: dict[int, int] = {}

    def keeps(self, begun: Running) -> bool:
        """Whether a step that has just begun may run on while the next one is planned; then it
        is `running`.
        """
        if self._executor is None or not self._executor.carries(begun.scores):
            return False
        self._run(begun)
        return True

    def advance(self) -> Running:
        """The running step, to be looked at; the one after it runs now, if it could be begun."""
        before = self.running
        assert before is not None
        self._run(None)
        try:
            self._run(self._begin_after(before))
        except Exception:
            # Nothing has changed: it will be begun when everything is known.
            log.exception("a step could not be begun before the one before it was looked at")
        return before

    def complete(self, before: Running, outcome: Outcome) -> None:
        """What came of the step before the running one: its plan is no longer a draft token."""
        if self.running is not None:
            self.running.plan = completed(self.running.plan, before.plan, outcome)

    def trees(self, running: Running) -> TreeBatch:
        """What a step runs; waits where only the device knows."""
        if running.trees is not None:
            return running.trees
        assert self._executor is not None
        begun = perf_counter()
        trees = self._executor.trees(running.scores)
        self._metrics.seconds["verify"] += perf_counter() - begun
        return trees

    def growing(self, sequence: Sequence) -> int:
        """Positions that the running step may make permanent for a sequence; 0: it has no part."""
        return 0 if sequence.slot is None else self._grows.get(sequence.slot, 0)

    def drop(self) -> None:
        """Forget the running step, whatever comes of it, when it is over."""
        running = self.running
        self._run(None)
        if running is not None and self._executor is not None:
            try:
                self._executor.trees(running.scores)
            except Exception:
                log.exception("a step failed that nobody waits for any more")

    def forget(self) -> None:
        """Forget the running step without speaking to the executor."""
        self._run(None)

    def _run(self, running: Running | None) -> None:
        self.running, self._grows = running, {}
        if running is not None:
            plan = running.plan
            grows = (1 + plan.max_depth).tolist()
            self._grows = dict(zip(plan.slots.tolist(), grows, strict=True))

    def _begin_after(self, before: Running) -> Running | None:
        """Begin the step after `before`; None where that must be looked at first."""
        assert self._executor is not None
        traits, schedule = self._drafter.traits, before.schedule
        # Mostly the next step draft tokens if this one does, and a policy should be asked once.
        draft_tokens = schedule.plan.max_nodes.any()
        if (draft_tokens and not traits.drafts_on_device) or (
            traits.needs_features and not draft_tokens
        ):
            return None
        since = monotonic()
        schedule_ahead = self._scheduler.plan_next(schedule)
        if schedule_ahead is None or not self._drafter.carry(schedule_ahead.plan):
            return None
        scores = self._executor.carry(schedule_ahead.plan)
        if scores is None:
            return None
        self._metrics.carried += 1
        return Running(schedule_ahead, schedule_ahead.plan, None, scores, since)


def carrying(executor: Executor) -> OverlapExecutor | None:
    """The executor, from now on one that steps can be carried on by; None where it cannot be."""
    if isinstance(executor, OverlapExecutor) and executor.keep_state():
        return executor
    return None


def completed(plan: Plan, before: Plan, outcome: Outcome) -> Plan:
    """A carried plan, now that the outcome of the step before is known.

    A row that failed there goes on from where it was; nobody cares any more.
    """
    place = {slot: row for row, slot in enumerate(before.slots.tolist())}
    rows = [place[slot] for slot in plan.slots.tolist()]
    output_tokens = outcome.output_tokens
    last = [output_tokens[row][-1:] for row in rows]
    return replace(
        plan,
        kv_len=before.kv_len[rows] + outcome.n_tokens[rows],
        known=tuple(
            np.array(token, np.int32) if token else stand_in
            for token, stand_in in zip(last, plan.known, strict=True)
        ),
        ends=None,
    )
