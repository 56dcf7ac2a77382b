"""The engine: one thread that takes news, plans, steps, looks at the outcome and tells it."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic

from forerun.constrain.grammars import Grammars, NoGrammars
from forerun.engine.drafter import Drafter
from forerun.engine.executor import Executor
from forerun.engine.metrics import Metrics, Stats
from forerun.engine.output import Ending, Kept, complete, delta, keep
from forerun.engine.plan import Outcome, TokenLogprobs
from forerun.engine.request import Delta, Finish, Request, Sink
from forerun.engine.scheduler import Schedule, Scheduler
from forerun.engine.seats import Seats
from forerun.engine.sequence import Sequence
from forerun.engine.step import step
from forerun.engine.stopwatch import TimedDrafter, TimedExecutor
from forerun.engine.validate import validate
from forerun.errors import BusyError, EngineError, RequestError
from forerun.spec.policy import Policy
from forerun.text.stream import TextStream
from forerun.text.tokenizer import Tokenizer
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")

QUIET = 0.05
"""Seconds without work after which the engine counts as idle and checks itself."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the engine itself.

    max_waiting   sequences that may wait for a slot; a request that finds so many is refused
    max_choices   largest n of a request
    max_failures  steps in a row that may fail before the engine gives up
    """

    max_waiting: int = 1024
    max_choices: int = 128
    max_failures: int = 3


class Engine:
    """Runs requests on one executor.

    `submit`, `abort`, `drain`, `shutdown`, `stats` and `alive` may be used from any thread;
    everything else happens on the engine's own, which `start` begins. Without `start`, whoever
    calls `step_once` is that thread.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        policy: Policy,
        tokenizer: Tokenizer,
        grammars: Grammars,
        options: EngineOptions,
    ) -> None:
        self._metrics = Metrics()
        self._executor = TimedExecutor(executor, self._metrics.seconds)
        self._drafter = TimedDrafter(drafter, self._metrics.seconds)
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._options = options
        self._scheduler = Scheduler(executor.limits, policy)
        self._policy = policy
        self._seats = Seats(self._executor, self._drafter, policy, grammars)
        self._live: dict[RequestId, list[Sequence]] = {}
        self._failures = 0
        self._checked = False
        self._orders = count()
        # Shared with other threads, under the lock of `_changed`:
        self._changed = threading.Condition()
        self._news: deque[Callable[[], None]] = deque()
        self._ids: set[RequestId] = set()
        self._entering = 0
        self._draining = self._stopping = False
        self._broken: str | None = None
        self._thread: threading.Thread | None = None

    # --- any thread --------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once the engine gave up or was shut down."""
        if self._broken is not None or self._stopping:
            return False
        return self._thread is None or self._thread.is_alive()

    @property
    def context(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self._scheduler.context

    def start(self) -> None:
        """Begin to run requests on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` gets its deltas on the engine's thread, one with `finish` last
        for each choice.

        Raises RequestError (ContextError, BusyError) where it cannot be honoured, EngineError
        where the engine is no more; nothing has been allocated then.
        """
        limits = self._executor.limits
        validate(request, limits.vocab, self.context, self._options.max_choices)
        if request.grammar is not None and isinstance(self._grammars, NoGrammars):
            raise RequestError("This engine was started without structured output.", "grammar")
        with self._changed:
            self._refuse(request)
            order = next(self._orders)
            sequences = [
                Sequence((order, index), request, sink, self._stream(request))
                for index in range(request.n)
            ]
            self._ids.add(request.id)
            self._entering += request.n
            self._news.append(partial(self._enter, sequences))
            self._changed.notify_all()

    def abort(self, request: RequestId) -> None:
        """End a request; its choices finish with ABORT before the next step. Unknown: nothing."""
        with self._changed:
            if request in self._ids:
                self._news.append(partial(self._end_request, request, Ending(Finish.ABORT)))
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the others, `timeout` seconds at most. True if all
        ended.
        """
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._ids, timeout)

    def shutdown(self) -> None:
        """Abort what still runs and end the thread. Idempotent. The executor is not touched
        beyond its slots: it belongs to whoever made it.
        """
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all(Ending(Finish.ABORT))

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        return self._metrics.snapshot(self._scheduler.load(self._entering))

    def check(self) -> None:
        """Prove that no page, slot or matcher leaked. Raises AssertionError.

        On the engine's thread, or while it is idle.
        """
        self._scheduler.check()
        running, waiting = self._scheduler.running, self._scheduler.waiting
        assert self._seats.taken == {s.slot for s in running}, "a slot is open to nobody"
        live = {id(s) for sequences in self._live.values() for s in sequences}
        assert live == {id(s) for s in running + waiting}, "a sequence is lost"
        if not live:
            assert self._scheduler.index.pool.held == 0, "pages are held by nobody"

    def _refuse(self, request: Request) -> None:
        """Raise where no request, or not this one, is taken now."""
        if self._broken is not None:
            raise EngineError(self._broken)
        if self._draining:
            raise BusyError("The server is shutting down.")
        if request.id in self._ids:
            raise RequestError(f"A request with the id {request.id!r} is running.", "id")
        waiting = self._entering + len(self._scheduler.waiting)
        if waiting >= self._options.max_waiting:
            raise BusyError(f"{waiting} sequences are waiting already; try again later.")

    def _stream(self, request: Request) -> TextStream:
        stopping = request.stopping
        return TextStream(
            self._tokenizer, stopping.stop, stopping.include_stop, request.skip_special_tokens
        )

    # --- the engine's thread -----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                # With nothing to do for a moment, one turn is a check; then sleep for good.
                patience = None if self._checked else QUIET
                self._changed.wait_for(lambda: self._news or self._live or self._stopping, patience)
                if self._stopping:
                    break
            try:
                self.step_once()
            except Exception as error:
                log.exception("the engine's loop failed")
                self._give_up(f"The engine failed: {error or type(error).__name__}")
            if self._broken is not None:
                return
        self._take_news()
        self._end_all(Ending(Finish.ABORT))

    def step_once(self) -> bool:
        """One turn of the loop. False when there was nothing to do."""
        start = monotonic()
        self._take_news()
        schedule = self._scheduler.plan()
        if schedule is None:
            self._rest()
            return False
        self._checked = False
        if not self._seat(schedule):
            return True
        outcome = self._step(schedule)
        if outcome is not None:
            self._look(schedule, outcome)
            nodes = sum(map(len, schedule.plan.known)) + int(outcome.n_guesses.sum())
            self._metrics.step(nodes, monotonic() - start)
        return True

    def _take_news(self) -> None:
        while self._news:
            with self._changed:
                news = self._news.popleft()
            news()

    def _rest(self) -> None:
        """Nothing to do: a good time to prove that nothing leaked."""
        if not self._checked:
            self.check()
            self._checked = True

    def _enter(self, sequences: list[Sequence]) -> None:
        """A submitted request reaches the queue."""
        self._live[sequences[0].request.id] = list(sequences)
        for sequence in sequences:
            self._scheduler.add(sequence)
        with self._changed:
            self._entering -= len(sequences)

    def _seat(self, schedule: Schedule) -> bool:
        """Close and open slots as planned. False when that ended a request: plan anew."""
        for slot in schedule.closed:
            self._seats.close(slot)
        self._metrics.preemptions += len(schedule.closed)
        sound = True
        for sequence in schedule.opened:
            if sequence.slot is None:  # Ended with a sibling that could not be opened.
                continue
            try:
                self._seats.open(sequence)
            except Exception as error:
                log.exception("request %s could not be opened", sequence.request.id)
                self._end_request(sequence.request.id, _failed(error))
                sound = False
        return sound

    def _step(self, schedule: Schedule) -> Outcome | None:
        """Run the step; where it fails, end the requests it was for, and no others."""
        try:
            outcome = step(schedule.plan, self._executor, self._drafter, self._grammars)
        except Exception as error:
            log.exception("a step failed")
            self._metrics.failed_steps += 1
            self._failures += 1
            for sequence in schedule.rows:
                self._end_request(sequence.request.id, _failed(error))
            if self._failures >= self._options.max_failures:
                self._give_up(f"{self._failures} steps in a row failed, the last with: {error}")
            return None
        self._failures = 0
        return outcome

    def _look(self, schedule: Schedule, outcome: Outcome) -> None:
        """Make the outcome of every row permanent and tell what is new."""
        for slot, message in self._grammars.errors().items():
            for sequence in schedule.rows:
                if sequence.slot == slot:
                    self._end_request(sequence.request.id, Ending(Finish.ERROR, error=message))
        for row, sequence in enumerate(schedule.rows):
            if sequence.slot is None:
                continue  # Ended by an earlier row of the same request.
            if not outcome.finite[row]:
                message = "The model's output was not finite, or nothing was allowed to follow."
                self._end_request(sequence.request.id, Ending(Finish.ERROR, error=message))
                continue
            self._settle(schedule, row, outcome)

    def _settle(self, schedule: Schedule, row: int, outcome: Outcome) -> None:
        """Commit the pages of one row, count, apply the stop conditions and tell the news."""
        sequence, plan = schedule.rows[row], schedule.plan
        if sequence.sampling.prompt_logprobs is not None:
            sequence.echo(outcome.prompt_logprobs[row])
        tokens = outcome.tokens[row, : outcome.n_tokens[row]]
        sequence.append(tokens)
        sequence.table.commit(outcome.committed(plan, row), sequence.tokens)
        if not plan.samples[row]:
            return
        sequence.table.rollback()
        guesses, accepted = int(outcome.n_guesses[row]), len(tokens) - 1
        self._metrics.row(guesses, accepted)
        sequence.tally.add(guesses, accepted)
        if plan.max_nodes[row]:
            self._policy.observe(int(plan.slots[row]), guesses, accepted)
        try:
            kept = self._keep(sequence, tokens.tolist())
        except Exception as error:
            log.exception("request %s failed", sequence.request.id)
            self._end_request(sequence.request.id, _failed(error))
            return
        self._report(sequence, kept, outcome.logprobs[row] if outcome.logprobs else ())

    def _keep(self, sequence: Sequence, tokens: list[int]) -> Kept:
        """Push decided tokens through the grammar, if there is one, and the stop conditions."""
        eos_ids = self._tokenizer.eos_ids
        if sequence.request.grammar is None or sequence.slot is None:
            return keep(sequence, tokens, eos_ids)
        whole = self._grammars.commit(sequence.slot, tokens)
        kept = keep(sequence, tokens[:whole], eos_ids)
        return kept if whole is None or kept.ending else complete(sequence, kept)

    def _report(
        self, sequence: Sequence, kept: Kept, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> None:
        """Tell what was kept; if that ends the sequence, give back first what it holds."""
        if sequence.reported == len(kept.tokens) > 0:
            self._metrics.first_token.add(monotonic() - sequence.submitted)
        self._metrics.output_tokens += len(kept.tokens)
        if kept.ending is not None:
            self._remove(sequence, kept.ending.finish)
        news = delta(sequence, kept, logprobs)
        if news is not None:
            self._tell(sequence, news)

    def _tell(self, sequence: Sequence, news: Delta) -> None:
        try:
            sequence.sink(news)
        except Exception:
            log.exception("the sink of request %s failed", sequence.request.id)
            for other in tuple(self._live.get(sequence.request.id, ())):
                self._remove(other, Finish.ABORT)

    def _remove(self, sequence: Sequence, finish: Finish) -> None:
        """Give back all that a sequence holds, and forget it."""
        metrics, request = self._metrics, sequence.request.id
        metrics.finished[finish] += 1
        metrics.duration.add(monotonic() - sequence.submitted)
        metrics.prompt_tokens += sequence.prompt_len
        metrics.cached_tokens += sequence.cached_tokens or 0
        slot = self._scheduler.remove(sequence)
        self._live[request].remove(sequence)
        if slot is not None:
            self._seats.close(slot)
        if not self._live[request]:
            del self._live[request]
            with self._changed:
                self._ids.discard(request)
                self._changed.notify_all()

    def _end_request(self, request: RequestId, ending: Ending) -> None:
        """End every choice of a request that still runs."""
        for sequence in tuple(self._live.get(request, ())):
            if sequence in self._live.get(request, ()):  # A failing sink ends its siblings.
                self._report(sequence, Kept((), sequence.stream.finish(), ending))

    def _end_all(self, ending: Ending) -> None:
        self._take_news()
        for request in tuple(self._live):
            self._end_request(request, ending)

    def _give_up(self, message: str) -> None:
        """Take no more requests and end all there are: the executor cannot be trusted."""
        with self._changed:
            self._broken = message
        self._seats.abandon()
        self._end_all(Ending(Finish.ERROR, error=message))
        log.error("%s The engine has given up.", message)


def _failed(error: Exception) -> Ending:
    text = f"The engine failed while it ran this request: {error or type(error).__name__}"
    return Ending(Finish.ERROR, error=text)
