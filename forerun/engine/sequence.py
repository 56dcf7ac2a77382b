"""One choice of a request: its tokens, its pages, its text so far."""

from array import array
from collections import Counter
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import add, gt, setitem
from time import monotonic
from typing import Any

import numpy as np

from forerun.cache.table import PageTable
from forerun.columns import Column, column, consume
from forerun.engine.request import Request, Sink, SpeculationStats, choice_seed
from forerun.engine.trace import StepTrace
from forerun.interface.plan import Outcome, TokenLogprobs
from forerun.text.stream import TextStream
from forerun.types import Ints, RequestId


@dataclass(slots=True)
class SpeculationCounts:
    """The counts behind SpeculationStats, while the sequence runs.

    reason  of the last step's budget
    draft_tokens, accepted   of each step that emitted tokens
    predicted  as in SpeculationStats
    """

    reason: str = ""
    draft_tokens: "array[int]" = field(default_factory=lambda: array("H"))
    accepted: "array[int]" = field(default_factory=lambda: array("H"))
    predicted: tuple[int, int] = (0, 0)

    def stats(self) -> SpeculationStats:
        """Return the counts as they are reported."""
        steps = Counter(self.accepted)
        return SpeculationStats(
            steps=len(self.accepted),
            draft_tokens=sum(self.draft_tokens),
            accepted=sum(self.accepted),
            histogram=tuple(steps[count] for count in range(max(self.accepted, default=-1) + 1)),
            reason=self.reason,
            predicted=self.predicted,
        )


class Sequence:
    """State of one choice, from submission to its last token.

    The independent numbers and their order, which check.py asserts:

        0 <= prompt_len <= total            tokens decided: the prompt, then the output
        0 <= table.length < total           tokens with keys and values in pages
        slot is None  =>  table.length == 0 a sequence without a slot owns nothing
        0 <= reported                       output tokens that count (a stop can cut a step's)

    over      it has ended and its client knows; a running step may still need its slot and pages
    bulk      its tokens may be detokenized with others' in bulk (BulkFilter)
    limit     most tokens, prompt and output
    shared    tokens that filled cached pages when it took its slot

    A step reads and writes these of all sequences at once (`append`, `count`), so
    none of them is a property. A preempted sequence loses slot and pages, nothing more: when it
    resumes, prompt and output so far are its known tokens.
    """

    def __init__(
        self, order: tuple[int, int], request: Request, sink: Sink, stream: TextStream
    ) -> None:
        self.order, self.index = order, order[1]  # Of the request's choices.
        self.request = request
        seed = choice_seed(request.sampling.seed, order[1])
        self.sampling = replace(request.sampling, seed=seed)
        self.sink = sink
        self.stream = stream
        self.slot: int | None = None
        self.over = self.bulk = False
        self.constrained = request.grammar is not None
        self.bounded = request.speculation.bounded
        self.table: PageTable
        self.prompt_len = self.total = len(request.prompt)
        self.limit = self.prompt_len + request.stopping.max_tokens
        # Room for one more, because a step emits a token even if max_tokens is 0.
        self.buffer = np.zeros(max(self.limit, self.total + 1), np.int32)
        self.buffer[: self.total] = request.prompt
        self.reported = self.shared = 0
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.unsent: list[int] = []
        self.unsent_logprobs: list[TokenLogprobs] = []
        self.unsent_trace: list[StepTrace] = []
        self.first_sent = False
        self.counts = SpeculationCounts()
        # Seconds on the monotonic clock: submitted, given a slot, first token decided.
        self.submitted = monotonic()
        self.admitted: float | None = None
        self.first_decided: float | None = None

    @property
    def tokens(self) -> Ints:
        """int32[total] all decided tokens; a view."""
        return self.buffer[: self.total]

    def upcoming(self, count: int) -> Ints:
        """Return int32[count], the first decided tokens that have not run through the target; a
        view.
        """
        begin = self.table.length
        return self.buffer[begin : begin + count]

    @property
    def output(self) -> Ints:
        """int32[.] the decided tokens after the prompt; a view."""
        return self.buffer[self.prompt_len : self.total]

    @property
    def pending(self) -> int:
        """Decided tokens that have not run through the target; 1 = decoding, more = prefill."""
        return self.total - self.table.length

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.limit - self.total

    @property
    def reuses_prefix(self) -> bool:
        """False while the request needs log-probabilities of the prompt: every token must run for
        them.
        """
        if self.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) >= self.prompt_len - 1

    def update_bulk(self) -> None:
        """Update `bulk`: whether no text is held back and only text is reported."""
        request, waits = self.request, self.unsent or not self.first_sent
        more = self.constrained or request.speculation.trace or len(request.prediction)
        checked = waits or more or self.over or self.sampling.logprobs is not None
        self.bulk = not checked and self.stream.passes


class Columns:
    """One attribute of many sequences, in order: `list(Columns.slots(rows))`."""

    slots: Column[Sequence, int] = column("slot")
    indices: Column[Sequence, int] = column("index")
    request_ids: Column[Sequence, RequestId] = column("request.id")
    sinks: Column[Sequence, Sink] = column("sink")
    tables: Column[Sequence, PageTable] = column("table")
    lengths: Column[Sequence, int] = column("table.length")
    reserved: Column[Sequence, int] = column("table.reserved")
    pages: Column[Sequence, "array[int]"] = column("table.pages")
    totals: Column[Sequence, int] = column("total")
    limits: Column[Sequence, int] = column("limit")
    buffers: Column[Sequence, Any] = column("buffer")
    reported: Column[Sequence, int] = column("reported")
    constrained: Column[Sequence, bool] = column("constrained")
    bounded: Column[Sequence, bool] = column("bounded")
    bulk: Column[Sequence, bool] = column("bulk")
    over: Column[Sequence, bool] = column("over")
    counts: Column[Sequence, SpeculationCounts] = column("counts")
    accepted: Column[Sequence, "array[int]"] = column("counts.accepted")
    draft_tokens: Column[Sequence, "array[int]"] = column("counts.draft_tokens")


def append(sequences: Several[Sequence], tokens: Several[list[int]]) -> None:
    """Append decided tokens to all these sequences. Raises ValueError, and changes nothing, beyond
    what a request allows.
    """
    totals, buffers = list(Columns.totals(sequences)), list(Columns.buffers(sequences))
    counts = list(map(len, tokens))
    ends = list(map(add, totals, counts))
    if any(map(gt, ends, map(len, buffers))):
        places = zip(ends, map(len, buffers), strict=True)
        end, room = next(each for each in places if each[0] > each[1])
        raise ValueError(f"{end} tokens decided, room for {room}")
    flat = chain.from_iterable
    targets = flat(map(repeat, buffers, counts)), flat(map(range, totals, ends))
    consume(map(setitem, *targets, flat(tokens)))
    consume(map(setattr, sequences, repeat("total"), ends))


def count(step: Several[Sequence], rows: list[int], outcome: Outcome) -> None:
    """Count, for these rows of a step, the draft tokens that it verified and accepted."""
    sequences = list(map(step.__getitem__, rows))
    accepted = map((-1).__add__, map(outcome.n_tokens.tolist().__getitem__, rows))
    consume(map(array.append, Columns.accepted(sequences), accepted))
    draft_tokens = map(outcome.n_draft_tokens.tolist().__getitem__, rows)
    consume(map(array.append, Columns.draft_tokens(sequences), draft_tokens))
