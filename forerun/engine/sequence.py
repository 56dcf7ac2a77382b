"""One choice of a request: its tokens, its pages, its text so far."""

from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.engine.request import Request, Sink, SpeculationStats, choice_seed
from forerun.engine.trace import StepTrace
from forerun.interface.plan import SlotInit, TokenLogprobs
from forerun.speculative.tree import DraftSource, TreeBatch
from forerun.text.stream import TextStream
from forerun.types import Ints


@dataclass(slots=True)
class Tally:
    """What SpeculationStats will say, while it grows."""

    steps: int = 0
    draft_tokens: int = 0
    reason: str = ""
    histogram: list[int] = field(default_factory=list)
    predicted: tuple[int, int] = (0, 0)

    def add(self, draft_tokens: int, accepted: int) -> None:
        """Count one step that emitted tokens."""
        self.steps += 1
        self.draft_tokens += draft_tokens
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += 1

    def stats(self) -> SpeculationStats:
        """The counts as they are reported."""
        return SpeculationStats(
            steps=self.steps,
            draft_tokens=self.draft_tokens,
            accepted=sum(a * steps for a, steps in enumerate(self.histogram)),
            histogram=tuple(self.histogram),
            reason=self.reason,
            predicted=self.predicted,
        )

    def add_predicted(self, trees: TreeBatch, row: int, path: Ints) -> None:
        """Count the draft tokens of one step out of the prediction; `path`: nodes accepted."""
        if trees.drafts:
            sources, root = trees.drafts[row].sources(), trees.root(row)
            right = [sources[node - root - 1] for node in path.tolist()]
            counted = [found.count(DraftSource.PREDICTION) for found in (sources, right)]
            self.predicted = self.predicted[0] + counted[0], self.predicted[1] + counted[1]


class Sequence:
    """State of one choice, from submission to its last token.

    The independent numbers and their order, which `check` asserts:

        0 <= prompt_len <= total            tokens decided: the prompt, then the output
        0 <= table.length < total           of which keys and values are in pages
        slot is None  =>  table.length == 0 a sequence without a slot owns nothing
        0 <= reported                       output tokens that count (a stop can cut a step's)

    `over` says that its end was told: what it still holds, a running step needs.

    Everything else is a property. A preempted sequence loses slot and pages, nothing more:
    when it resumes, prompt and output so far are its known tokens.
    """

    def __init__(
        self, order: tuple[int, int], request: Request, sink: Sink, stream: TextStream
    ) -> None:
        self.order = order
        self.request = request
        seed = choice_seed(request.sampling.seed, order[1])
        self.sampling = replace(request.sampling, seed=seed)
        self.sink = sink
        self.stream = stream
        self.slot: int | None = None
        self.over = False
        self.table: PageTable
        self.prompt_len = self.total = len(request.prompt)
        # One more than asked, because a step emits a token even where none is wanted.
        self._buffer = np.zeros(self.total + max(request.stopping.max_tokens, 1), np.int32)
        self._buffer[: self.total] = request.prompt
        self.reported = 0
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.unsent: list[int] = []
        self.unsent_logprobs: list[TokenLogprobs] = []
        self.unsent_trace: list[StepTrace] = []
        self.news_sent = False
        self.tally = Tally()
        # Seconds on the monotonic clock: it waited, read its prompt, decoded.
        self.submitted = monotonic()
        self.admitted: float | None = None
        self.first_decided: float | None = None

    def attach(self, index: PrefixIndex) -> None:
        """Give the sequence its (empty) page table."""
        self.table = PageTable(index)

    @property
    def index(self) -> int:
        """Which of the request's choices this is."""
        return self.order[1]

    @property
    def tokens(self) -> Ints:
        """int32[total] all decided tokens; a view."""
        return self._buffer[: self.total]

    def upcoming(self, count: int) -> Ints:
        """int32[count] the first decided tokens that have not run through the target; a view."""
        begin = self.table.length
        return self._buffer[begin : begin + count]

    @property
    def output(self) -> Ints:
        """int32[.] the decided tokens after the prompt; a view."""
        return self._buffer[self.prompt_len : self.total]

    @property
    def pending(self) -> int:
        """Decided tokens that have not run through the target; 1 = decoding, more = prefill."""
        return self.total - self.table.length

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.request.stopping.max_tokens - (self.total - self.prompt_len)

    @property
    def end(self) -> int:
        """Keys and values that the text can have in the end: its last token never runs."""
        return self.total + self.remaining - 1

    @property
    def reuses_prefix(self) -> bool:
        """False while log-probabilities of the prompt are wanted: they need every token run."""
        if self.sampling.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) >= self.prompt_len - 1

    def slot_init(self) -> SlotInit:
        """What an executor and a drafter must know. The sequence has a slot."""
        assert self.slot is not None
        tokens, prediction = self.tokens.copy(), self.request.prediction
        return SlotInit(self.slot, tokens, self.prompt_len, self.sampling, prediction)

    def append(self, tokens: list[int]) -> None:
        """More tokens are decided. Raises ValueError beyond what the request allows."""
        end = self.total + len(tokens)
        if end > len(self._buffer):
            raise ValueError(f"{end} tokens decided, room for {len(self._buffer)}")
        self._buffer[self.total : end] = tokens
        self.total = end

    def drop(self, count: int) -> None:
        """The last `count` tokens are not decided after all. The sequence has no pages."""
        self.total -= count

    def echo(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Log-probabilities of the tokens after positions table.length, +1, ...

        Before the commit of the step. A resumed sequence sees some of them again.
        """
        seen = len(self.prompt_logprobs) - self.table.length
        room = self.prompt_len - 1 - len(self.prompt_logprobs)
        self.prompt_logprobs += entries[seen : seen + max(room, 0)]

    def check(self) -> None:
        """Prove that the numbers are in order. Raises AssertionError."""
        assert 0 < self.prompt_len <= self.total <= len(self._buffer)
        assert 0 <= self.table.length < self.total, "more keys and values than tokens"
        assert self.slot is not None or self.table.reserved == 0, "pages without a slot"
        self.table.check()
