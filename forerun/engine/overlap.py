"""Rounds that go on from each other: the engine's core where a device can go on by itself.

Rounds stand in a queue, which is two deep within a turn:

    device     | round n           | round n+1         | round n+2
    host        plan n+1 | finish n  plan n+2 | finish n+1

What round n+1 needs of round n stays on the device (Executor.begin_after). The host plans it from
bounds: as if every draft token of round n were right, so that each position that can come has its
page. Nothing else about an outcome changes but that it is known one round later. So a row that
ended in round n runs in round n+1 too: what comes of that is dropped, and slot and pages are given
back when it is over.

Where the host has a say - a prompt, a grammar, draft tokens from the text, somebody waiting for a
free slot, too few pages - round n is finished first. Then round n+1 begins, and only then are the
outputs of round n reported: stop conditions, text, sinks. Whoever is ended by a string, as the text
says, runs once more here too.

    device     | round n           |                   | round n+1
    host        report n-1           finish n | plan n+1 | report n
"""

import logging
from collections import deque
from collections.abc import Callable
from itertools import compress
from operator import add, not_

import numpy as np

from forerun.engine.core import EngineCore
from forerun.engine.options import EngineOptions
from forerun.engine.parts import Parts
from forerun.engine.row_output import Ending, PendingRows
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import Columns, Sequence
from forerun.engine.step import StageTimer, Step, with_request
from forerun.interface.executor import NotYetError
from forerun.interface.plan import Outcome, Plan, Round
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")


def make_core(
    parts: Parts, options: EngineOptions, ended: Callable[[RequestId], None]
) -> EngineCore:
    """The core of an engine; with rounds that overlap, where that is asked for and can be.

    ended  called when the last choice of a request has ended
    """
    if options.overlap and parts.executor.capabilities.overlap:
        return OverlappingCore(parts, options.max_failures, ended)
    if options.overlap:
        log.warning(
            "overlap is left out: it needs captured rounds (cuda) or jax, opened with it; this "
            "executor is %s",
            parts.executor.name,
        )
    return EngineCore(parts, options.max_failures, ended)


class OverlappingCore(EngineCore):
    """Begins a round before the one before it is finished, or before its outputs are reported."""

    def __init__(self, parts: Parts, max_failures: int, ended: Callable[[RequestId], None]) -> None:
        super().__init__(parts, max_failures, ended)
        # Begun and not finished, oldest first: two at most, and one between turns.
        self._steps: deque[Step] = deque()
        # Are over, but have a part in a running step.
        self._leaving: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """See EngineCore."""
        return bool(self.outputs.live or self._steps)

    @property
    def open(self) -> list[Sequence]:
        """See EngineCore."""
        return self.scheduler.running + self._leaving

    def step(self) -> bool:
        """See EngineCore."""
        if not self._steps:
            if not self._queue_next():
                return self._stalled()
            if not self._steps:
                return True
        self._begin_after(self._steps[-1])
        step = self._steps.popleft()
        outcome = self._finish(step)
        if outcome is None:
            return True
        pending, later = self.outputs.commit(step, outcome), None
        if not self._steps:  # The device shall not wait while outputs are reported.
            pending, later = self._split_ended(step, outcome, pending)
        self.outputs.emit(step, outcome, pending)
        self._release()
        self._observe(step, outcome)
        if later is not None:
            self._queue_next()
            self.outputs.emit(step, outcome, later)
            self._release()
        return True

    def check(self) -> None:
        """See EngineCore."""
        super().check()
        assert all(map(self._runs, self._leaving)), "nothing runs that it waits for"

    def end_all(self, ending: Ending) -> None:
        """See EngineCore."""
        super().end_all(ending)
        self._drop()

    def abandon(self, ending: Ending) -> None:
        """See EngineCore."""
        self._steps.clear()
        super().abandon(ending)

    def _runs(self, sequence: Sequence) -> bool:
        """Whether it has a part in a running step."""
        return any(sequence in step.rows for step in self._steps)

    def _vacate(self, sequence: Sequence) -> None:
        if self._runs(sequence):
            self.scheduler.running.remove(sequence)
            self._leaving.append(sequence)
        else:
            super()._vacate(sequence)

    def _release(self) -> None:
        """Take slots and pages from the sequences that are over and in no running step."""
        for sequence in [one for one in self._leaving if not self._runs(one)]:
            self._leaving.remove(sequence)
            self._parts.close(self.scheduler.vacate(sequence))

    def _fail(self, rows: tuple[Sequence, ...], error: Exception) -> None:
        self._drop()  # What runs went on from what is not there.
        super()._fail(rows, error)

    def _drop(self) -> None:
        """Wait for what runs, and forget it, whatever comes of it."""
        while self._steps:
            try:
                self._parts.executor.finish(self._steps.popleft().round)
            except Exception:
                log.exception("a round failed that nobody waits for any more")
        self._release()

    def _queue_next(self) -> bool:
        """Begin the next step, where somebody has a row in it. False where nobody is ready."""
        schedule = self.scheduler.plan()
        if schedule is not None and (step := self._begin(schedule)) is not None:
            self._steps.append(step)
        return schedule is not None

    def _begin_after(self, running: Step) -> None:
        """Begin the step that goes on from the running round, where nothing needs to be known of
        that first.
        """
        round = running.round
        # Mostly the next step has draft tokens if this one does, and a policy should be asked once.
        if not round.continues or not self._can_overlap(round.plan, round):
            return
        schedule = self._plan_after(round, running.rows)
        if schedule is None or not self._can_overlap(schedule.plan, round):
            return
        timer = StageTimer()
        ends = np.array(list(Columns.limits(schedule.rows)), np.int32) - np.int32(1)
        plan = with_request(schedule.plan, self._parts)
        timer.lap("draft")
        try:
            begun = self._parts.executor.begin_after(round, plan, ends)
            timer.lap("verify")
            self._steps.append(Step(schedule, begun, timer, [], carried=True))
        except NotYetError:
            pass
        except Exception:
            # Nothing has changed: it will be begun when everything is known.
            log.exception("a step could not be begun before the one before it was finished")

    def _can_overlap(self, plan: Plan, running: Round) -> bool:
        return self._parts.ask_drafter(lambda drafter: drafter.can_overlap(plan, running), False)

    def _plan_after(self, round: Round, sequences: tuple[Sequence, ...]) -> Schedule | None:
        """Plan the step that goes on from a running round of these sequences: they once more, but
        those that end there whatever comes. None where that must be known first.

        Pages are reserved for the longest that the running step can become; where they run out,
        nobody is preempted for that.
        """
        scheduler = self.scheduler
        alive = [not sequence.over for sequence in sequences]
        rows = list(compress(sequences, alive))
        waits = scheduler.waiting and (scheduler.free_slots or self._leaving)
        if waits or len(rows) != len(scheduler.running):
            return None  # Somebody could join, or is not in the running step.
        longer = list(map((1).__add__, compress(round.plan.max_depth.tolist(), alive)))
        on = [sequence.remaining > 1 for sequence in rows]
        rows, longer = list(compress(rows, on)), list(compress(longer, on))
        reserved = zip(rows, longer, strict=True)
        if not rows or not all(row.table.reserve(count + 1) for row, count in reserved):
            return None
        kv_len = list(map(add, Columns.lengths(rows), longer))
        budgets, decision = scheduler.grant(rows, scheduler.scored - len(rows), kv_len, own=2)
        plan = scheduler.make_plan(rows, [1] * len(rows), kv_len, budgets, decision)
        return Schedule(plan, tuple(rows), decision)

    def _split_ended(
        self, step: Step, outcome: Outcome, pending: PendingRows
    ) -> tuple[PendingRows, PendingRows]:
        """The outputs of rows that end whatever their text says, or are decided again, and need not
        run on; and those of the others.
        """
        on = self.outputs.bulk.rows(step.rows, outcome, pending.rows)
        for place in compress(range(len(on)), map(not_, on.copy())):
            row = pending.rows[place]
            sequence, committed = step.rows[row], pending.committed.get(row)
            stops, tokens = sequence.request.stopping.stop_tokens, outcome.output_tokens[row]
            on[place] = sequence.remaining > 0 and not any(map(stops.__contains__, tokens))
            on[place] = on[place] and (committed is None or not committed.ends)
        ended, others = compress(pending.rows, map(not_, on)), compress(pending.rows, on)
        return pending._replace(rows=[*ended]), pending._replace(rows=[*others])
