"""Overlap: the next step begins before the running one is looked at.

Without it the device waits while the host looks at an outcome, tells the news and plans. With it
the host does that for step n while step n+1 runs:

    device     | step n            | step n+1          | step n+2
    host        plan n+1 | look n   plan n+2 | look n+1

What step n+1 needs of step n stays on the device. The host plans it from bounds: as if every
draft token of step n were right, so that each position that can come has its page. Nothing else
about an outcome changes but that it is known one step later. So a row that ended in step n runs in
step n+1 too: what comes of that is dropped, and slot and pages are given back when it is over.

Where the host has a say - a prompt, a grammar, draft tokens from the text,
somebody waiting for a free slot, too few pages - step n is looked at first. Then step n+1 begins,
and only then are the news of step n told: stop conditions, text, sinks. Whoever is ended by a
string, as the text says, runs once more here too.

    device     | step n            |                 | step n+1
    host        news n-1            look n | plan n+1  news n
"""

import logging
from dataclasses import dataclass

import numpy as np

from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.step import Decided, Parts, Running, StepOver
from forerun.engine.timing import StageTimer
from forerun.interface.executor import Executor, OverlapExecutor, Scores
from forerun.interface.plan import CarriedPlan, Outcome, Plan
from forerun.speculative.tree import TreeBatch

log = logging.getLogger("forerun.engine")


@dataclass(frozen=True, slots=True)
class Carried:
    """A step that was begun before the one before it is looked at. Fields as in Running."""

    rows: tuple[Sequence, ...]
    plan: CarriedPlan
    scores: Scores
    timer: StageTimer

    def completed(self, before: Running, outcome: Outcome) -> Running:
        """The same step, now that the outcome of the one before is known."""
        plan = self.plan.completed(before.plan, outcome)
        return Running(self.rows, plan, None, self.scores, self.timer)


class Overlap:
    """Keeps the running step, where one may run while the host does something else.

    running  the step that has begun and was not looked at; None between other steps
    """

    def __init__(self, executor: OverlapExecutor, parts: Parts, scheduler: Scheduler) -> None:
        self._executor, self._parts, self._scheduler = executor, parts, scheduler
        self.running: Running | Carried | None = None
        # Of the running step: slots, and positions that it may make permanent in each.
        self._grows: dict[int, int] = {}
        self._waits = False  # It must be looked at before the next one is planned.

    def keeps(self, begun: Running) -> bool:
        """Whether a step that has just begun may run on while the next one is planned; then it
        is `running`.
        """
        if not self._executor.carries(begun.scores):
            return False
        self._run(begun)
        return True

    def runs(self, begun: Running | None) -> None:
        """A step that has just begun, if one has, is running, while the news of the one before are
        told. It is carried on from where it can be.
        """
        self._run(begun)
        self._waits = begun is not None and not self._executor.carries(begun.scores)

    def advance(self) -> Running:
        """The running step, to be looked at; the one after it runs now, if it could be begun."""
        before, waits = self.running, self._waits
        assert isinstance(before, Running), "it was completed with the step before it"
        self._run(None)
        if waits:
            return before
        try:
            self._run(self._begin_after(before))
        except Exception:
            # Nothing has changed: it will be begun when everything is known.
            log.exception("a step could not be begun before the one before it was looked at")
        return before

    def complete(self, before: Running, outcome: Outcome) -> None:
        """What came of the step before the running one, which was carried on from it, if any."""
        if isinstance(self.running, Carried):
            self.running = self.running.completed(before, outcome)

    def trees(self, running: Running) -> TreeBatch:
        """What a carried step ran; waits for the device."""
        running.timer.resume()
        trees = self._executor.trees(running.scores)
        running.timer.lap("verify")
        return trees

    def growing(self, sequence: Sequence) -> int:
        """Positions that the running step may make permanent for a sequence; 0: it has no part."""
        return 0 if sequence.slot is None else self._grows.get(sequence.slot, 0)

    def drop(self) -> None:
        """Forget the running step, whatever comes of it, when it is over."""
        running = self.running
        self._run(None)
        if running is not None:
            try:
                self._executor.trees(running.scores)
            except Exception:
                log.exception("a step failed that nobody waits for any more")

    def forget(self) -> None:
        """Forget the running step without speaking to the executor."""
        self._run(None)

    def _run(self, running: Running | Carried | None) -> None:
        self.running, self._grows, self._waits = running, {}, False
        if running is not None:
            plan = running.plan
            known = 1 if isinstance(plan, CarriedPlan) else np.array(list(map(len, plan.known)))
            grows = (known + plan.max_depth).tolist()
            self._grows = dict(zip(plan.slots.tolist(), grows, strict=True))

    def _begin_after(self, before: Running) -> Carried | None:
        """Begin the step after `before`; None where that must be looked at first."""
        drafting = self._executor.drafting(before.scores)

        def carries(plan: Plan | CarriedPlan) -> bool:
            return self._parts.ask_drafter(lambda drafter: drafter.carry(plan, drafting), False)

        # Mostly the next step has draft tokens if this one does, and a policy should be asked once.
        if not carries(before.plan):
            return None
        timer = StageTimer()
        planned = self._scheduler.plan_next(before.rows, before.plan)
        timer.resume()
        if planned is None:
            return None
        plan, rows = planned
        if carries(plan):
            timer.lap("draft")
            next_draft = self._parts.ask_drafter(lambda drafter: drafter.draft_request(plan), None)
            scores = self._executor.carry(plan, next_draft)
            if scores is not None:
                return Carried(rows, plan, scores, timer)
        return None


def parted(over: StepOver, decided: list[Decided]) -> tuple[list[Decided], list[Decided]]:
    """The rows that end whatever their text says, or are decided again, and need not run on; and
    the others.
    """
    ends: tuple[list[Decided], list[Decided]] = [], []
    for row, committed in decided:
        sequence, tokens = over.rows[row], over.outcome.output_tokens[row]
        stops = sequence.request.stopping.stop_tokens
        runs_on = sequence.remaining > 0 and not any(token in stops for token in tokens)
        runs_on = runs_on and (committed is None or not committed.ends)
        ends[runs_on].append((row, committed))
    return ends


def carrying(executor: Executor) -> OverlapExecutor | None:
    """The executor, from now on one that steps can be carried on by; None where it cannot be."""
    if isinstance(executor, OverlapExecutor) and executor.keep_state():
        return executor
    return None
