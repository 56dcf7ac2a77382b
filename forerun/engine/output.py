"""Applies stop conditions to decided tokens, decodes their text, and reports both as deltas."""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from time import monotonic

from forerun.engine.metrics import EngineMetrics
from forerun.engine.parts import Parts
from forerun.engine.request import Delta, Finish, Request, Stopping
from forerun.engine.row_output import (
    Ending,
    PendingRows,
    RowOutput,
    add_predicted,
    advance_grammar,
    append_prompt_logprobs,
    failed,
    finish_by_grammar,
    held_text,
    pooled_ending,
    step_trace,
)
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.step import Step
from forerun.engine.trace import MAX_STEPS
from forerun.interface.grammars import Committed
from forerun.interface.plan import Outcome, Reports
from forerun.text.tokenizer import Tokenizer
from forerun.types import RequestId

log = logging.getLogger("forerun.engine")


def check_stop(sequence: Sequence, tokens: Collection[int], eos_ids: Collection[int]) -> RowOutput:
    """Apply the stop conditions to decided tokens, one by one, and return those that count with
    their text.

    An end-of-text id sets no `reason`, any other stop does. Before min_tokens a stop token is text.
    """
    stopping, text, before = sequence.request.stopping, "", sequence.reported
    counted: list[int] = []
    room, early = stopping.max_tokens - before, sequence.sampling.min_tokens - before
    ending = Ending(Finish.LENGTH) if room <= 0 else None
    for token in tokens:
        if ending is not None:
            break
        counted.append(token)
        is_stop = token in stopping.stop_tokens and (len(counted) > early or token in eos_ids)
        if not is_stop or stopping.include_stop:
            piece = sequence.stream.push(token, len(counted) <= early)
            text += piece.text
            if piece.stopped is not None:
                return RowOutput(tuple(counted), text, Ending(Finish.STOP, piece.stopped))
        if is_stop:
            ending = Ending(Finish.STOP, None if token in eos_ids else token)
        elif len(counted) == room:
            ending = Ending(Finish.LENGTH)
    if ending is not None:
        text += sequence.stream.finish()
    return RowOutput(tuple(counted), text, ending)


class FastDetokenize:
    """Selects rows that need no `check_stop`: their tokens are whole characters and no stop
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._text = bytearray(tokenizer.whole_tokens(vocab))
        # The same without stop tokens of running requests, and how many requests have each.
        self._whole, self._stops = self._text.copy(), Counter[int]()

    def add(self, stopping: Stopping, requests: int = 1) -> None:
        """Register the stop tokens of `requests` more requests; a negative number removes them."""
        for token in {each for each in stopping.stop_tokens if 0 <= each < len(self._text)}:
            self._stops[token] += requests
            self._whole[token] = self._text[token] and not self._stops[token]

    def takes(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Return whether a sequence with these new tokens needs no stop check and is below its
        limit.
        """
        if not sequence.bulk or sequence.total >= sequence.limit:
            return False
        is_whole = self._whole
        return all(is_whole[token] for token in tokens)


def make_delta(sequence: Sequence, output: RowOutput, logprobs: Reports) -> Delta | None:
    """Return the delta of a step, or None while there is no text to report.

    Tokens whose text is held back (half a character, the beginning of a stop string) wait
    with their log-probabilities until text is released.
    """
    sequence.unsent += output.tokens
    sequence.unsent_logprobs += logprobs[: len(output.tokens)]
    ending = output.ending
    if not output.text and ending is None:
        return None
    first, sequence.first_sent = not sequence.first_sent, True
    waiting = sequence.unsent, sequence.unsent_logprobs, sequence.unsent_trace
    tokens, reports, trace = tuple(waiting[0]), tuple(waiting[1]), tuple(waiting[2])
    for unsent in waiting:
        unsent.clear()
    return Delta(
        request=sequence.request.id,
        index=sequence.index,
        text=output.text,
        tokens=tokens,
        logprobs=reports,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if first else (),
        finish=ending.finish if ending else None,
        stop_reason=ending.reason if ending else None,
        stats=sequence.counts.stats() if ending else None,
        cached_tokens=(sequence.cached_tokens or 0) if first else 0,
        error=ending.error if ending else None,
        trace=trace,
        code=ending.code if ending else None,
        embedding=ending.embedding if ending else b"",
    )


class OutputProcessor:
    """Commits outcomes and reports them: tokens, pages, stop conditions, text, deltas, ends.

    live   the choices of each request that have not ended, by its id
    bulk   selects the rows that need no stop check
    ended  called when the last choice of a request has ended
    release_sequence  releases slot and pages of an ended sequence
    """

    def __init__(
        self,
        parts: Parts,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        release_sequence: Callable[[Sequence], None],
        ended: Callable[[RequestId], None],
    ) -> None:
        self.live: dict[RequestId, list[Sequence]] = {}
        self._parts, self._scheduler, self._metrics = parts, scheduler, metrics
        self._release_sequence, self._ended = release_sequence, ended
        self._eos_ids, self._pieces = parts.tokenizer.eos_ids, parts.tokenizer.pieces
        self.bulk = FastDetokenize(parts.tokenizer, parts.executor.limits.vocab)
        # Output tokens of the longest choice that has ended, by request.
        self._longest: dict[RequestId, int] = {}

    def add(self, request: Request, sequences: list[Sequence]) -> None:
        """Register the choices of a new request."""
        self.live[request.id] = list(sequences)
        self.bulk.add(request.stopping)

    def commit(self, step: Step, outcome: Outcome) -> PendingRows:
        """Make the outcome of every row permanent: tokens, pages, grammars. Returns the rows for
        `emit` to report. A row whose logits were not finite ends its request.
        """
        plan, tokens = step.round.plan, outcome.output_tokens
        for row, finite in enumerate(outcome.finite.tolist()):
            if not finite:
                message = (
                    "The model's logits were not finite (NaN or infinite), or the grammar and "
                    "logit_bias together allowed no token. No token could be chosen."
                )
                self.end(step.rows[row].request.id, Ending(Finish.ERROR, error=message))
        counts, samples, constrained = (
            outcome.committed(plan),
            plan.samples.tolist(),
            plan.constrained.tolist(),
        )
        rows, committed = list[int](), dict[int, Committed]()
        for row, sequence in enumerate(step.rows):
            if sequence.finished:  # It ended just now, or while the step ran.
                continue
            if outcome.prompt_logprobs and outcome.prompt_logprobs[row]:
                append_prompt_logprobs(sequence, outcome.prompt_logprobs[row])
            sequence.table.commit(counts[row], sequence.tokens)
            if not samples[row]:
                if sequence.pooled and sequence.pooled.takes(step.round, row):
                    self._emit(sequence, RowOutput((), "", pooled_ending(sequence.pooled)))
                continue
            rows.append(row)
            if constrained[row] and (
                state := advance_grammar(self._parts.grammars, sequence, tokens[row], self.end)
            ):
                committed[row] = state
                if state.unconstrained_from_here:
                    sequence.constrained = False
                    self._parts.grammars.close(plan.slots[row].item())
        return PendingRows(rows, committed)

    def emit(self, step: Step, outcome: Outcome, pending: PendingRows) -> None:
        """Send the deltas of the rows that `commit` returned, up to where stop conditions cut their
        tokens, and end the sequences that stop. Rows whose sequence has ended meanwhile are
        skipped.
        """
        sequences = step.rows
        rows = [row for row in pending.rows if not sequences[row].finished]
        self._metrics.rows(step.round.trees, rows, outcome)
        tokens, draft_tokens = outcome.output_tokens, outcome.n_draft_tokens.tolist()
        bulk, checked = list[int](), list[int]()
        for row in rows:
            sequence = sequences[row]
            sequence.counts.step(draft_tokens[row], len(tokens[row]) - 1)
            (bulk if self.bulk.takes(sequence, tokens[row]) else checked).append(row)
        self._emit_bulk([(sequences[row], tokens[row]) for row in bulk])
        for row in checked:
            self._emit_row(step, outcome, row, pending.committed.get(row))

    def _emit_bulk(self, rows: list[tuple[Sequence, list[int]]]) -> None:
        """Report all tokens of these sequences, without stop conditions."""
        joined, starts = self._pieces.joined, self._pieces.starts
        news = list[tuple[Sequence, Delta]]()
        for sequence, tokens in rows:
            sequence.reported += len(tokens)
            self._metrics.output_tokens += len(tokens)
            text = b"".join([joined[starts[t] : starts[t + 1]] for t in tokens]).decode()
            news.append((sequence, Delta(sequence.request.id, sequence.index, text, tuple(tokens))))
        self._send(news)

    def _emit_row(
        self, step: Step, outcome: Outcome, row: int, committed: Committed | None
    ) -> None:
        """Apply the stop conditions to the tokens of a row, and report those that count."""
        sequence = step.rows[row]
        if sequence.finished:
            return  # It ended with another choice of its request.
        tokens = outcome.output_tokens[row]
        if len(sequence.request.prediction) and outcome.n_draft_tokens[row]:
            add_predicted(sequence, step.round.trees, row, outcome.paths[row])
        try:
            counted = tokens if committed is None else tokens[: committed.valid]
            output = check_stop(sequence, counted, self._eos_ids)
            sequence.reported += len(output.tokens)
            if committed is not None:
                output = finish_by_grammar(sequence, output, committed)
        except Exception as error:
            log.exception("request %s failed", sequence.request.id)
            self.end(sequence.request.id, failed(error))
            return
        if sequence.request.speculation.trace and len(sequence.counts.accepted) <= MAX_STEPS:
            sequence.unsent_trace.append(step_trace(sequence, output, step, row, outcome))
        self._emit(sequence, output, outcome.logprobs[row] if outcome.logprobs else ())
        if committed is not None and committed.must_reopen and not sequence.finished:
            self._parts.close(self._scheduler.preempt(sequence))
            self._metrics.preemptions += 1
            sequence.total -= len(tokens) - len(output.tokens)  # The rest is decided again.
        sequence.update_bulk()

    def _emit(self, sequence: Sequence, output: RowOutput, logprobs: Reports = ()) -> None:
        """Send the delta of an output; if it ends the sequence, release that sequence first."""
        if sequence.reported == len(output.tokens) > 0:
            sequence.first_decided = monotonic()
            self._metrics.first_token.add(sequence.first_decided - sequence.submitted)
        self._metrics.output_tokens += len(output.tokens)
        if output.ending is not None:
            self._remove(sequence, output.ending.finish)
        delta = make_delta(sequence, output, logprobs)
        if delta is not None:
            self._send([(sequence, delta)])

    def _send(self, deltas: list[tuple[Sequence, Delta]]) -> None:
        """Send each sequence its delta. A sink that raises ends all choices of its request."""
        broken: set[RequestId] = set()
        for sequence, delta in deltas:
            request = sequence.request.id
            if request in broken:
                continue
            try:
                sequence.sink(delta)
            except Exception:
                broken.add(request)
                log.exception("the sink of request %s failed", request)
                for other in tuple(self.live.get(request, ())):
                    self._remove(other, Finish.ABORT)

    def end(self, request: RequestId, ending: Ending) -> None:
        """End every choice of a request that still runs."""
        for sequence in tuple(self.live.get(request, ())):
            if sequence in self.live.get(request, ()):  # A failing sink ends its siblings.
                self._emit(sequence, RowOutput((), held_text(sequence), ending))

    def _remove(self, sequence: Sequence, finish: Finish) -> None:
        """Release an ended sequence and remove it."""
        request = sequence.request.id
        self._metrics.ended(sequence, finish)
        self._longest[request] = max(self._longest.get(request, 0), sequence.reported)
        sequence.finished, sequence.bulk = True, False
        self._release_sequence(sequence)
        self.live[request].remove(sequence)
        if not self.live[request]:
            del self.live[request]
            self.bulk.add(sequence.request.stopping, -1)
            self._metrics.longest_output.add(self._longest.pop(request))
            self._ended(request)  # The id may be used again as soon as the last delta is there.
