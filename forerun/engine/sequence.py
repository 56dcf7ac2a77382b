"""One choice of a request: its tokens, pages and text so far."""

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from forerun.cache.table import PageTable
from forerun.engine.pooling import PooledPrompt
from forerun.engine.request import Request, Sink, SpeculationStats, choice_seed
from forerun.engine.trace import StepTrace
from forerun.interface.plan import TokenLogprobs
from forerun.text.stream import TextStream
from forerun.types import Ints


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of SpeculationStats, while the sequence runs.

    reason  of the last step's budget
    draft_tokens, accepted   of each step that emitted tokens
    predicted  as in SpeculationStats
    """

    reason: str = ""
    draft_tokens: "array[int]" = field(default_factory=lambda: array("H"))
    accepted: "array[int]" = field(default_factory=lambda: array("H"))
    predicted: tuple[int, int] = (0, 0)

    def step(self, draft_tokens: int, accepted: int) -> None:
        """Count a step that emitted tokens, with its verified and accepted draft tokens."""
        self.draft_tokens.append(draft_tokens)
        self.accepted.append(accepted)

    def stats(self) -> SpeculationStats:
        """Return the counts as SpeculationStats."""
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
    """State of one choice, from submission to its last token. It holds the only copy of the tokens,
    which executors and drafters read (interface.slot_init.SequenceText).

    The independent counters and their order, which check.py asserts:

        0 <= prompt_len <= total            tokens decided: the prompt, then the output
        0 <= table.length < total           tokens with keys and values in pages
        slot is None  =>  table.length == 0 a sequence without a slot owns nothing
        0 <= reported                       output tokens that count (a stop can cut a step's)

    finished  its end was reported; a running step may still need its slot and pages
    bulk      its tokens may be detokenized with others' in bulk (FastDetokenize)
    limit     most tokens, prompt and output
    shared    tokens that filled pages in memory, or on disk, when it took its slot
    stored    tokens that fill pages on disk; -1 before the page store was searched

    A preempted sequence loses only slot and pages: when it resumes, prompt and output so far are
    its known tokens.
    """

    def __init__(
        self, order: tuple[int, int], request: Request, sink: Sink, stream: TextStream
    ) -> None:
        self.order, self.index = order, order[1]  # Of the request's choices.
        self.request = request
        seed = choice_seed(request.sampling.seed, order[1])
        self.sampling = replace(request.sampling, seed=seed)
        self.sink, self.stream = sink, stream
        self.slot: int | None = None
        self.finished = self.first_sent = self.bulk = False
        self.constrained = request.grammar is not None
        self.bounded = request.speculation.bounded
        self.table: PageTable
        self.prompt_len = self.total = len(request.prompt)
        self.limit = self.prompt_len + request.stopping.max_tokens
        # Room for one more: a step emits a token even if max_tokens is 0, and where rounds overlap
        # a sequence that has reached its limit runs once more.
        self.buffer = np.zeros(self.limit + 1, np.int32)
        self.buffer[: self.total] = request.prompt
        self.pooled = PooledPrompt(request.pooling, self.total) if request.pooling else None
        self.reported, self.shared, self.stored = 0, 0, -1
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.unsent: list[int] = []
        self.unsent_logprobs: list[TokenLogprobs] = []
        self.unsent_trace: list[StepTrace] = []
        self.counts = SpeculationCounts()
        # Seconds on the monotonic clock: submitted, given a slot, first token decided.
        self.submitted = monotonic()
        self.admitted: float | None = None
        self.first_decided: float | None = None

    @property
    def tokens(self) -> Ints:
        """int32[total] all decided tokens; a view."""
        return self.buffer[: self.total]

    def append(self, tokens: list[int]) -> None:
        """Append decided tokens. Raises ValueError, and changes nothing, if they exceed the
        request's limit.
        """
        buffer, total = self.buffer, self.total
        if total + len(tokens) > len(buffer):
            raise ValueError(f"{total + len(tokens)} tokens decided, room for {len(buffer)}")
        for place, token in enumerate(tokens, total):
            buffer[place] = token
        self.total = total + len(tokens)

    def upcoming(self, count: int) -> Ints:
        """Return int32[count], the next decided tokens that have not run through the target; a
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
        """The number of decided tokens that have not run through the target; 1 = decoding, more =
        prefill.
        """
        return self.total - self.table.length

    @property
    def remaining(self) -> int:
        """The number of output tokens still allowed."""
        return self.limit - self.total

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached pages can be reused. Not while the request needs log-probabilities or
        hidden states of the whole prompt: then every token must run.
        """
        if self.sampling.prompt_logprobs is None:
            return self.pooled is None or not self.pooled.every
        return len(self.prompt_logprobs) >= self.prompt_len - 1

    def update_bulk(self) -> None:
        """Update `bulk`: whether no text is held back and only text is reported."""
        request, waits = self.request, self.unsent or not self.first_sent
        more = self.constrained or request.speculation.trace or len(request.prediction)
        checked = waits or more or self.finished or self.sampling.logprobs is not None
        self.bulk = not checked and self.stream.passes
