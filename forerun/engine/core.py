"""The engine core: begins a round, finishes it and reports its outcome; and the loop of such turns.

If the device can continue by itself, rounds overlap: overlap.py.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter

from forerun.engine.check import check_all
from forerun.engine.metrics import EngineMetrics
from forerun.engine.output import OutputProcessor
from forerun.engine.parts import Parts
from forerun.engine.request import Finish
from forerun.engine.row_output import Ending, failed
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.step import Step, begin, finish, step_report
from forerun.errors import EngineError, RankError
from forerun.interface.plan import Outcome
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")

STALL_SECONDS = 0.02
"""Longest single wait while no sequence is ready, so that new requests are taken in time."""

QUIET = 0.05
"""Seconds without work after which the engine counts as idle and checks itself."""


class EngineCore:
    """Runs sequences, one step per turn. For one thread; has no locks.

    max_failures  consecutive failed steps after which `step` raises EngineError
    ended         called when the last choice of a request has ended
    """

    def __init__(self, parts: Parts, max_failures: int, ended: Callable[[RequestId], None]) -> None:
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(
            parts.executor.limits,
            parts.policy,
            features=parts.drafter.traits.needs_features,
            ready=self._ready,
            reusable_prefix_len=parts.executor.reusable_prefix_len,
            copy_page=parts.executor.copy_page,
        )
        self.outputs = OutputProcessor(
            parts, self.scheduler, self.metrics, self._release_sequence, ended
        )
        self._parts = parts
        self._max_failures = max_failures
        self._failures = 0
        # End of the last step, or arrival of the first sequence: the next step's time begins here.
        self._since = perf_counter()

    @property
    def busy(self) -> bool:
        """Whether a sequence has not ended, or a round is running."""
        return bool(self.outputs.live)

    @property
    def open(self) -> list[Sequence]:
        """The sequences that have a slot."""
        return self.scheduler.running

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all choices of a new request."""
        if not self.busy:
            self._since = perf_counter()
        request = sequences[0].request
        self.metrics.choices.add(request.n)
        self.metrics.max_tokens.add(request.stopping.max_tokens)
        self.outputs.add(request, sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> bool:
        """Run one step of all sequences that are ready. Returns False if there is no sequence at
        all.

        An error in the step ends its requests. Raises EngineError after max_failures consecutive
        failures, RankError at the first.
        """
        schedule = self.scheduler.plan()
        if schedule is None:
            return self._stalled()
        step = self._begin(schedule)
        if step is not None and (outcome := self._finish(step)) is not None:
            self.outputs.emit(step, outcome, self.outputs.commit(step, outcome))
            self._observe(step, outcome)
        return True

    def check(self) -> None:
        """Raise AssertionError if a page, slot or sequence leaked."""
        check_all(self.scheduler, self.open, self._parts.open_slots, self.outputs.live)

    def end_all(self, ending: Ending) -> None:
        """End every request with `ending`. No step may follow."""
        for request in tuple(self.outputs.live):
            self.outputs.end(request, ending)

    def abandon(self) -> None:
        """Stop calling executor, drafter and grammars: the engine gives up, and a second failure
        would hide the first.
        """
        self._parts.open_slots.clear()

    def _release_sequence(self, sequence: Sequence) -> None:
        """Release slot and pages of an ended sequence."""
        if sequence.slot is not None:  # First: if a part raises, the sequence can still be ended.
            self._parts.close(sequence.slot)
        self.scheduler.remove(sequence)

    def _ready(self, sequence: Sequence) -> bool:
        """Return whether a running sequence can take part in the next step."""
        grammar, slot = sequence.request.grammar, sequence.slot
        return grammar is None or slot is None or self._parts.grammars.ready(slot, grammar)

    def _begin(self, schedule: Schedule) -> Step | None:
        """Open and close slots, then begin the step. Returns None if it has no row or failed, which
        ends its requests.
        """
        if schedule.opened or schedule.closed:
            self.metrics.preemptions += len(schedule.closed)
            if not self._open_slots(schedule):
                return None  # A request ended: plan anew.
        if not schedule.rows:
            return None
        try:
            return begin(schedule, self._parts)
        except Exception as error:
            log.exception("a step could not be begun")
            self._fail(schedule.rows, error)
            return None

    def _open_slots(self, schedule: Schedule) -> bool:
        """Close and open slots as planned. Returns False if opening a sequence raised, which ends
        its request.
        """
        for slot in schedule.closed:
            self._parts.close(slot)
        sound = True
        for sequence in schedule.opened:
            if sequence.slot is None:  # Its request ended: another choice could not be opened.
                continue
            try:
                self._parts.open(sequence)
            except Exception as error:
                log.exception("request %s could not be opened", sequence.request.id)
                self.outputs.end(sequence.request.id, failed(error))
                sound = False
        return sound

    def _stalled(self) -> bool:
        """Wait for grammars or the disk: no sequence is ready. Returns False if there is no
        sequence at all.
        """
        if self.outputs.live:
            self.scheduler.wait(STALL_SECONDS, self._parts.grammars.wait)
            self._since = perf_counter()
        return bool(self.outputs.live)

    def _finish(self, step: Step) -> Outcome | None:
        """Wait for a round. Returns None if it failed, which ends its requests."""
        try:
            outcome = finish(step, self._parts)
        except Exception as error:
            log.exception("a step failed")
            self._fail(step.rows, error)
            return None
        self._failures = 0
        step.timer.known_ms = 1000.0 * (perf_counter() - self._since)
        return outcome

    def _observe(self, step: Step, outcome: Outcome) -> None:
        """Report a finished step to policy and metrics."""
        before, self._since = self._since, perf_counter()
        total = 1000.0 * (self._since - before)
        report = step_report(step.round.plan, outcome, step.timer.ms, total)
        report.carried, report.proposed = step.carried, step.proposed
        report.reason = step.schedule.decision.reason
        self._parts.policy.observe(report)
        pace = self.scheduler.pace
        if report.prompt_tokens:
            pace.observe(report.prompt_tokens, total)
        else:
            pace.decoding_ms = min(total, 2.0 * (pace.decoding_ms or total))
        self.metrics.step(report)

    def _fail(self, rows: tuple[Sequence, ...], error: Exception) -> None:
        """End the requests of a failed step. Raises as `step`."""
        self.metrics.failed_steps += 1
        self._failures, self._since = self._failures + 1, perf_counter()
        for sequence in rows:
            self.outputs.end(sequence.request.id, failed(error))
        if isinstance(error, RankError):
            raise error
        if self._failures >= self._max_failures:
            message = f"{self._failures} steps in a row failed, the last with: {error}"
            raise EngineError(message) from error


class EngineLoop:
    """The loop of the engine's own thread: each turn runs the calls that other threads have queued,
    then one step. thread.py has the methods for other threads.

    step_began  when the current step began (time.monotonic); None between steps
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._checked = False
        self._step_done: Callable[[], None] = lambda: None
        # Shared with other threads, under the lock of `_changed`:
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._ids: set[RequestId] = set()
        self._entering = 0
        self._draining = False
        self._stopping = False
        self._broken: str | None = None
        self._lost: Callable[[str], None] = lambda _: None
        self.step_began: float | None = None

    def _run(self) -> None:
        while self._broken is None:
            with self._changed:
                # After QUIET seconds without work one turn checks for leaks; then no time-out.
                patience = None if self._checked else QUIET
                self._changed.wait_for(
                    lambda: self._inbox or self._core.busy or self._stopping, patience
                )
                if self._stopping:
                    break
            self.step_began = monotonic()
            self.step_once()
            self.step_began = None
            if self._draining:
                with self._changed:
                    self._changed.notify_all()
        self._stop()

    def step_once(self) -> bool:
        """Run one turn. Returns False if there was no sequence; the first such turn checks for
        leaks. If a turn raises, the engine ends all requests with an error and accepts no more.
        """
        try:
            self._take_inbox()
            busy = self._core.step()
            self._step_done()
            if not busy and not self._checked:
                self._core.check()
            self._checked = not busy
        except Exception as error:
            log.exception("the engine failed and gives up")
            self._give_up(f"The engine failed and gave up: {error or type(error).__name__}")
            if isinstance(error, RankError):
                self._lost(str(error))
            return False
        return busy

    def _take_inbox(self) -> None:
        while self._inbox:
            with self._changed:
                order = self._inbox.popleft()
            order()
            self._step_done()

    def _enter(self, sequences: list[Sequence]) -> None:
        """Queue a submitted request."""
        self._core.add(sequences)
        with self._changed:
            self._entering -= len(sequences)

    def _ended(self, request: RequestId) -> None:
        """Remove a request whose last choice has ended and is about to be reported."""
        with self._changed:
            self._ids.discard(request)
            self._changed.notify_all()

    def _stop(self) -> None:
        self._take_inbox()
        self._core.end_all(Ending(Finish.ABORT))
        self._step_done()

    def _give_up(self, message: str) -> None:
        with self._changed:
            self._broken = message
            self._changed.notify_all()
        self._core.abandon()
        self._take_inbox()
        self._core.end_all(Ending(Finish.ERROR, error=message))
        self._step_done()
