"""What one turn does: begin a round, finish a round, make its outcome known. One thread, no locks.

Rounds stand in a queue, which is one deep, or two where a device can go on by itself:

    device     | round n           | round n+1         | round n+2
    host        plan n+1 | finish n  plan n+2 | finish n+1

What round n+1 needs of round n stays on the device (Plan.after). The host plans it from bounds: as
if every draft token of round n were right, so that each position that can come has its page.
Nothing else about an outcome changes but that it is known one round later. So a row that ended in
round n runs in round n+1 too: what comes of that is dropped, and slot and pages are given back when
it is over.

Where the host has a say - a prompt, a grammar, draft tokens from the text, somebody waiting for a
free slot, too few pages - round n is finished first. Then round n+1 begins, and only then are the
news of round n told: stop conditions, text, sinks. Whoever is ended by a string, as the text says,
runs once more here too.

    device     | round n           |                   | round n+1
    host        news n-1             finish n | plan n+1 | news n
"""

import logging
from collections import deque
from collections.abc import Callable
from itertools import repeat
from operator import add
from time import monotonic, perf_counter

from forerun.control.report import step_report
from forerun.engine.metrics import Metrics
from forerun.engine.news import Ending, News, failed
from forerun.engine.output import OutputProcessor
from forerun.engine.parts import Parts
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.sequence import Columns, Sequence
from forerun.engine.step import StageTimer, Step, begin, finish
from forerun.errors import EngineError, RankError
from forerun.interface.executor import NotYetError
from forerun.interface.plan import Outcome, Plan, Round
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")

STALL_SECONDS = 0.02
"""How long new requests may have to wait where all that run wait for what may follow."""


class EngineCore:
    """Runs sequences, one step per turn.

    max_failures  steps in a row that may fail; one more and `step` raises EngineError
    ended         called when the last choice of a request has ended
    overlap       let rounds go on from each other, where the executor can
    """

    def __init__(
        self,
        parts: Parts,
        max_failures: int,
        ended: Callable[[RequestId], None],
        overlap: bool = False,
    ) -> None:
        self.metrics = Metrics()
        features = parts.drafter.traits.needs_features
        about = parts.policy, features, self._ready, parts.executor.resumable
        self.scheduler = Scheduler(parts.executor.limits, *about)
        self.outputs = OutputProcessor(parts, self.scheduler, self.metrics, self._growing, ended)
        self._parts = parts
        self._grammars = parts.grammars
        self._max_failures = max_failures
        self._failures = 0
        # When the last step was over, or the first sequence came: the time of the next begins then.
        self._since = perf_counter()
        able = parts.executor.capabilities.overlap
        if overlap and not able:
            log.warning(
                "overlap is left out: it needs captured rounds (cuda) or jax, opened with it; this "
                "executor is %s",
                parts.executor.name,
            )
        self._overlap = overlap and able
        # Begun and not finished, oldest first: two at most, and one between turns.
        self._steps: deque[Step] = deque()

    @property
    def busy(self) -> bool:
        """Whether somebody is to be advanced, or a round runs."""
        return bool(self.outputs.live or self._steps)

    def add(self, sequences: list[Sequence]) -> None:
        """All choices of a new request join the queue."""
        if not self.busy:
            self._since = perf_counter()
        request = sequences[0].request
        self.metrics.choices.add(request.n)
        self.metrics.max_tokens.add(request.stopping.max_tokens)
        self.outputs.add(request, sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> bool:
        """Advance whoever can be advanced. False when nobody is there.

        What fails for one request ends that request. Raises where the engine itself is broken.
        """
        if not self._steps:
            schedule = self._begin_next()
            if schedule is None and self.outputs.live:  # All wait for what may follow.
                self._grammars.wait(STALL_SECONDS)
                self._since = perf_counter()
            if not self._steps:
                return schedule is not None or bool(self.outputs.live)
        if self._overlap:
            self._begin_after(self._steps[-1])
        step = self._steps.popleft()
        outcome = self._finish(step)
        if outcome is None:
            return True
        news = self.outputs.commit(step, outcome)
        # Where nothing runs, the device shall wait for its next round and not for the news.
        waits = self._overlap and not self._steps
        later: News | None = None
        if waits:
            news, later = self.outputs.parted(step, outcome, news)
        self.outputs.tell(step, outcome, news)
        self._observe(step, outcome)
        if later is not None:
            self._begin_next()
            self.outputs.tell(step, outcome, later)
        return True

    def check(self) -> None:
        """Prove that no page, slot or sequence leaked. Raises AssertionError."""
        self.scheduler.check()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        leaving = self.scheduler.leaving
        assert set(self._parts.open_slots) == {s.slot for s in running + leaving}, (
            "a slot is open to nobody"
        )
        assert all(self._growing(leaving)), "nothing runs that it waits for"
        live = {id(s) for sequences in self.outputs.live.values() for s in sequences}
        assert live == {id(s) for s in running + waiting}, "a sequence is lost"
        if not live and not leaving:
            assert self.scheduler.index.held == 0, "pages are held by nobody"

    def end_all(self, ending: Ending) -> None:
        """End every request. Nothing runs any more afterwards."""
        for request in tuple(self.outputs.live):
            self.outputs.end(request, ending)
        self._drop()
        self.outputs.release()

    def abandon(self, ending: Ending) -> None:
        """End everything without speaking to executor and drafter: they cannot be trusted."""
        self._parts.abandon()
        self._steps.clear()
        self.end_all(ending)

    def _growing(self, sequences: list[Sequence]) -> list[int]:
        """Positions that running rounds may make permanent for each of these; 0: has no part."""
        growing = [0] * len(sequences)
        for step in self._steps:
            more = map(step.grows.get, Columns.slots(sequences), repeat(0))
            growing = list(map(add, growing, more))
        return growing

    def _ready(self, sequence: Sequence) -> bool:
        """Whether a running sequence can take part in the next step."""
        grammar, slot = sequence.request.grammar, sequence.slot
        return grammar is None or slot is None or self._grammars.ready(slot, grammar)

    def _open_slots(self, schedule: Schedule) -> bool:
        """Close and open slots as planned. False when that ended a request: plan anew."""
        for slot in schedule.closed:
            self._parts.close(slot)
        self.metrics.preemptions += len(schedule.closed)
        sound = True
        for sequence in schedule.opened:
            if sequence.slot is None:  # Ended with a sibling that could not be opened.
                continue
            sequence.admitted = sequence.admitted or monotonic()
            try:
                self._parts.open(sequence)
            except Exception as error:
                log.exception("request %s could not be opened", sequence.request.id)
                self.outputs.end(sequence.request.id, failed(error))
                sound = False
        return sound

    def _begin_next(self) -> Schedule | None:
        """Plan the next step, and begin it where somebody has a row in it. Where that fails, end
        the requests it was for, and no others.
        """
        timer, schedule = StageTimer(), self.scheduler.plan()
        if schedule is None or not self._open_slots(schedule) or not schedule.rows:
            return schedule
        try:
            self._steps.append(begin(schedule, self._parts, timer))
        except Exception as error:
            log.exception("a step could not be begun")
            self._fail(schedule.rows, error)
        return schedule

    def _begin_after(self, running: Step) -> None:
        """Begin the step that goes on from the running round, where nothing needs to be known of
        that first.
        """
        round = running.round
        # Mostly the next step has draft tokens if this one does, and a policy should be asked once.
        if not round.continues or not self._can_overlap(round.plan, round):
            return
        timer, schedule = StageTimer(), self.scheduler.plan_after(round, running.rows)
        if schedule is None or not self._can_overlap(schedule.plan, round):
            return
        try:
            self._steps.append(begin(schedule, self._parts, timer))
        except NotYetError:
            pass
        except Exception:
            # Nothing has changed: it will be begun when everything is known.
            log.exception("a step could not be begun before the one before it was finished")

    def _can_overlap(self, plan: Plan, running: Round) -> bool:
        return self._parts.ask_drafter(lambda drafter: drafter.can_overlap(plan, running), False)

    def _finish(self, step: Step) -> Outcome | None:
        """Wait for a round. None where it failed, which ends the requests it was for."""
        try:
            outcome = finish(step, self._parts)
        except Exception as error:
            log.exception("a step failed")
            self._drop()  # It went on from what is not there.
            self._fail(step.rows, error)
            self.outputs.release()
            return None
        self._failures = 0
        step.timer.known(self._since)
        return outcome

    def _drop(self) -> None:
        """Wait for what runs, and forget it, whatever comes of it."""
        while self._steps:
            try:
                self._parts.executor.finish(self._steps.popleft().round)
            except Exception:
                log.exception("a round failed that nobody waits for any more")

    def _observe(self, step: Step, outcome: Outcome) -> None:
        """A step is over: let policy and metrics know what it was and what it took."""
        before, self._since = self._since, perf_counter()
        total = 1000.0 * (self._since - before)
        report = step_report(step.round.plan, outcome, step.timer.ms, total)
        report.carried, report.proposed = step.carried, step.proposed
        report.reason = step.schedule.decision.reason
        self._parts.policy.observe(report)
        self.metrics.step(report)

    def _fail(self, rows: tuple[Sequence, ...], error: Exception) -> None:
        """A step failed: end the requests it was for. Raises where that happens again and again."""
        self.metrics.failed_steps += 1
        self._failures, self._since = self._failures + 1, perf_counter()
        for sequence in rows:
            self.outputs.end(sequence.request.id, failed(error))
        if isinstance(error, RankError):
            raise error
        if self._failures >= self._max_failures:
            message = f"{self._failures} steps in a row failed, the last with: {error}"
            raise EngineError(message) from error
