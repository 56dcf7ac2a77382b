"""Overlap scheduling, for devices that can begin a round from the one before.

Rounds are in a queue, at most two of them within a turn:

    device     | round n           | round n+1         | round n+2
    host        plan n+1 | finish n  plan n+2 | finish n+1

What round n+1 needs of round n stays on the device (Executor.begin_after). The host plans it from
upper bounds, as if every draft token of round n were accepted, so that each possible position has
its page. Outcomes are the same, known one round later. A row that ended in round n therefore runs
in round n+1 too: its result is dropped, and slot and pages are released after that.

If the host is needed (for a prompt, a grammar, draft tokens from the text, a sequence waiting for a
free slot, or too few pages), round n is finished first. Then round n+1 begins, and only then are
the outputs of round n reported: stop conditions, text, sinks. A row that its text ends (a stop
string) runs once more here too.

    device     | round n           |                   | round n+1
    host        report n-1           finish n | plan n+1 | report n
"""

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from forerun.engine.core import EngineCore
from forerun.engine.parts import Parts
from forerun.engine.row_output import Ending, PendingRows
from forerun.engine.scheduler import Schedule
from forerun.engine.sequence import Sequence
from forerun.engine.step import StageTimer, Step, with_on_device_draft
from forerun.interface.plan import Outcome, Round
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")


def make_core(
    parts: Parts, overlap: bool, max_failures: int, ended: Callable[[RequestId], None]
) -> EngineCore:
    """Return an engine core. With `overlap` its rounds overlap if the executor can; else a warning
    is logged.

    max_failures, ended: see EngineCore.
    """
    if overlap and parts.executor.capabilities.overlap:
        return OverlappingCore(parts, max_failures, ended)
    if overlap:
        log.warning(
            "overlap is disabled: it needs captured rounds (cuda) or jax; this executor is %s",
            parts.executor.name,
        )
    return EngineCore(parts, max_failures, ended)


class OverlappingCore(EngineCore):
    """An engine core that begins a round before the previous one is finished, or before its outputs
    are reported.
    """

    def __init__(self, parts: Parts, max_failures: int, ended: Callable[[RequestId], None]) -> None:
        super().__init__(parts, max_failures, ended)
        # Begun and not finished, oldest first: two at most, and one between turns.
        self._steps: deque[Step] = deque()
        # Ended sequences that are part of a running step.
        self._leaving: list[Sequence] = []

    @property
    def busy(self) -> bool:
        """As in EngineCore."""
        return bool(self.outputs.live or self._steps)

    @property
    def open(self) -> list[Sequence]:
        """As in EngineCore."""
        return self.scheduler.running + self._leaving

    def step(self) -> bool:
        """Run a turn as EngineCore does."""
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
        if not self._steps:  # Begin the next step before reporting, so the device does not wait.
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
        """Check for leaks, as EngineCore does."""
        super().check()
        assert all(map(self._runs, self._leaving)), (
            "an ended sequence waits for a step that does not run"
        )

    def end_all(self, ending: Ending) -> None:
        """End every request, as EngineCore does."""
        super().end_all(ending)
        self._drop()

    def abandon(self) -> None:
        """As in EngineCore."""
        self._steps.clear()
        super().abandon()

    def _runs(self, sequence: Sequence) -> bool:
        """Return whether a sequence is part of a running step."""
        return any(sequence in step.rows for step in self._steps)

    def _release_sequence(self, sequence: Sequence) -> None:
        if self._runs(sequence):
            if self.scheduler.disk is not None:
                self.scheduler.disk.save(sequence)
            self.scheduler.running.remove(sequence)
            self._leaving.append(sequence)
        else:
            super()._release_sequence(sequence)

    def _release(self) -> None:
        """Free slots and pages of the ended sequences that are in no running step."""
        for sequence in [one for one in self._leaving if not self._runs(one)]:
            self._leaving.remove(sequence)
            self._parts.close(self.scheduler.free_slot(sequence))

    def _fail(self, rows: tuple[Sequence, ...], error: Exception) -> None:
        self._drop()  # The running step began from the failed one.
        super()._fail(rows, error)

    def _drop(self) -> None:
        """Wait for the running rounds and drop their results, errors included."""
        while self._steps:
            try:
                self._parts.executor.finish(self._steps.popleft().round)
            except Exception:
                log.exception("a round failed; its result was no longer needed")
        self._release()

    def _queue_next(self) -> bool:
        """Begin the next step, if it has a row. Returns False if no sequence is ready."""
        schedule = self.scheduler.plan()
        if schedule is not None and (step := self._begin(schedule)) is not None:
            self._steps.append(step)
        return schedule is not None

    def _begin_after(self, running: Step) -> None:
        """Begin the next step from the running round, if the host needs nothing of that round
        first.
        """
        round = running.round
        # The next step mostly drafts if this one does: check that first, to plan only once.
        if not round.can_overlap or not self._parts.drafter.can_overlap(round.plan, round):
            return
        schedule = self._plan_after(round, running.rows)
        if schedule is None or not self._parts.drafter.can_overlap(schedule.plan, round):
            return
        timer = StageTimer()
        ends = np.array([sequence.limit - 1 for sequence in schedule.rows], np.int32)
        plan = with_on_device_draft(schedule.plan, self._parts)
        timer.lap("draft")
        try:
            begun = self._parts.executor.begin_after(round, plan, ends)
        except Exception:
            # Nothing has changed: the step begins once this one is finished.
            log.exception("a step could not be begun before the one before it was finished")
            return
        if begun is not None:
            timer.lap("verify")
            self._steps.append(Step(schedule, begun, timer, [], carried=True))

    def _plan_after(self, round: Round, sequences: tuple[Sequence, ...]) -> Schedule | None:
        """Plan the step that begins from a running round of these sequences: the same ones, without
        those that certainly end there. None if the host must know the outcome first.

        Reserves pages for the longest possible outcome of the running step; if they run out, it
        preempts no sequence.
        """
        scheduler = self.scheduler
        deepest = zip(sequences, round.plan.max_depth.tolist(), strict=True)
        alive = [(sequence, depth) for sequence, depth in deepest if not sequence.finished]
        waits = scheduler.waiting and (scheduler.free_slots or self._leaving)
        if waits or len(alive) != len(scheduler.running):
            return None  # A sequence could join, or one is not in the running step.
        rows, kv_len = list[Sequence](), list[int]()
        for sequence, depth in alive:
            if sequence.remaining > 1:
                if not sequence.table.reserve(depth + 2):
                    return None
                rows.append(sequence)
                kv_len.append(sequence.table.length + depth + 1)
        if not rows:
            return None
        budgets, decision = scheduler.allocate_draft_tokens(
            rows, scheduler.num_logits_rows - len(rows), kv_len, own=2
        )
        plan = scheduler.make_plan(rows, [1] * len(rows), kv_len, budgets, decision)
        return Schedule(plan, tuple(rows), decision)

    def _split_ended(
        self, step: Step, outcome: Outcome, pending: PendingRows
    ) -> tuple[PendingRows, PendingRows]:
        """Split the rows to report: first those that end whatever their text is, or are decided
        again, so that they need not run in the next step; then the others.
        """
        ended, others = list[int](), list[int]()
        for row in pending.rows:
            sequence, committed = step.rows[row], pending.committed.get(row)
            stops, tokens = sequence.request.stopping.stop_tokens, outcome.output_tokens[row]
            ends = sequence.remaining <= 0 or any(token in stops for token in tokens)
            ends = ends or (committed is not None and committed.ends)
            (ended if ends else others).append(row)
        return pending._replace(rows=ended), pending._replace(rows=others)
