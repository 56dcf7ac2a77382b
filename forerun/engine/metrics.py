"""Plain counters of what the engine did; a snapshot of them is all that leaves this file."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from time import monotonic

from forerun.control.policy import Budget
from forerun.control.report import STAGES, StepReport
from forerun.engine.request import Finish
from forerun.engine.sequence import Sequence
from forerun.engine.trace import NO_DRAFT_ROW, DraftRow, source_name

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LENGTHS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""Bounds for numbers of tokens, to 500,000."""
CHOICES = (1, 2, 5, 10, 20)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RECENT = 512
"""Rows over which the rolling acceptance length is taken."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] values were <= bounds[i] and above the bound before; the last is the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class _Growing:
    """A histogram that still counts."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def frozen(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine holds at one moment: counts of sequences and pages.

    granted  what the decoding rows of the last step that had any were allowed, and why
    """

    waiting: int
    running: int
    pages: int
    pages_held: int
    pages_kept: int
    granted: tuple[Budget, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Draft tokens of one source at one depth (from 1): verified, and of these accepted."""

    source: str
    depth: int
    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot; all counts since the engine was made, times in seconds.

    finished           sequences by how they ended
    prompt_tokens      of admitted sequences; cached_tokens of them came from the prefix index
    output_tokens      tokens reported to clients
    steps, nodes       steps, and known tokens plus draft tokens that they ran; `carried` of the
                       steps were begun before the one before was looked at (overlap.py)
    drafts             rows that carried draft tokens; draft tokens and accepted count theirs
    accepted_at        accepted_at[i] drafts had their draft token at depth i + 1 accepted
    acceptance_length  tokens per row that sampled, over the last rows (0 before the first)
    seconds            where the time of steps went: draft, verify, mask, accept, commit, host
    first_token        from submission to the first decided token
    duration           from submission to the end
    queued, prefill, decode   of ended sequences: until a slot was free, from then to the first
                       decided token, from then to the end; `inference` is the last two together
    prompt_length, output_length   tokens of ended sequences
    longest_output     tokens of the longest choice of ended requests
    max_tokens, choices   what requests asked for
    by_source          what became of draft tokens, by who proposed them and how deep they hung
    step_seconds, step_nodes   per step
    """

    load: Load
    finished: dict[Finish, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    carried: int
    failed_steps: int
    nodes: int
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_at: tuple[int, ...]
    preemptions: int
    acceptance_length: float
    seconds: dict[str, float]
    first_token: Histogram
    duration: Histogram
    queued: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_length: Histogram
    output_length: Histogram
    longest_output: Histogram
    max_tokens: Histogram
    choices: Histogram
    by_source: tuple[SourceCount, ...]
    step_seconds: Histogram
    step_nodes: Histogram


class Metrics:
    """The counters. Written by the engine's thread; read, slightly torn at worst, by any."""

    def __init__(self) -> None:
        self.finished = dict.fromkeys(Finish, 0)
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.steps = self.carried = self.failed_steps = self.nodes = 0
        self.drafts = self.draft_tokens = self.accepted = 0
        self.accepted_at: list[int] = []
        self.preemptions = 0
        self.seconds = dict.fromkeys((*STAGES, "host"), 0.0)
        self.first_token = _Growing(SECONDS)
        self.duration = _Growing(SECONDS)
        self.queued, self.prefill = _Growing(SECONDS), _Growing(SECONDS)
        self.decode, self.inference = _Growing(SECONDS), _Growing(SECONDS)
        self.prompt_length, self.output_length = _Growing(LENGTHS), _Growing(LENGTHS)
        self.longest_output, self.max_tokens = _Growing(LENGTHS), _Growing(LENGTHS)
        self.choices = _Growing(CHOICES)
        self._by_source: dict[tuple[int, int], list[int]] = {}
        self.step_seconds = _Growing(SECONDS)
        self.step_nodes = _Growing(NODES)
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._recent_sum = 0

    def row(self, draft_tokens: int, accepted: int, drafted: DraftRow = NO_DRAFT_ROW) -> None:
        """One row sampled: it carried `draft_tokens`, of which a path of `accepted` was kept.

        drafted  the same in detail, where it is known
        """
        if len(self._recent) == RECENT:
            self._recent_sum -= self._recent[0]
        self._recent.append(accepted + 1)
        self._recent_sum += accepted + 1
        if not draft_tokens:
            return
        self.drafts += 1
        self.draft_tokens += draft_tokens
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1
        for place in zip(drafted.sources, drafted.depth, strict=True):
            self._by_source.setdefault(place, [0, 0])[0] += 1
        for node in drafted.accepted:
            self._by_source[drafted.sources[node], drafted.depth[node]][1] += 1

    def ended(self, sequence: Sequence, finish: Finish) -> None:
        """A sequence is over: count its lengths, and where its time went."""
        now = monotonic()
        self.finished[finish] += 1
        self.prompt_tokens += sequence.prompt_len
        self.cached_tokens += sequence.cached_tokens or 0
        self.duration.add(now - sequence.submitted)
        self.prompt_length.add(sequence.prompt_len)
        self.output_length.add(sequence.reported)
        admitted, first = sequence.admitted, sequence.first_decided
        self.queued.add((admitted or now) - sequence.submitted)
        if admitted is not None:
            self.inference.add(now - admitted)
            self.prefill.add((first or now) - admitted)
        if first is not None:
            self.decode.add(now - first)

    def step(self, report: StepReport) -> None:
        """One step is over."""
        self.steps += 1
        self.nodes += report.nodes
        self.step_nodes.add(report.nodes)
        self.step_seconds.add(report.total_ms / 1000.0)
        for stage, ms in report.ms.items():
            self.seconds[stage] += ms / 1000.0

    def snapshot(self, load: Load) -> Stats:
        """Freeze."""
        rows = len(self._recent)
        return Stats(
            load=load,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            steps=self.steps,
            carried=self.carried,
            failed_steps=self.failed_steps,
            nodes=self.nodes,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted=self.accepted,
            accepted_at=tuple(self.accepted_at),
            preemptions=self.preemptions,
            acceptance_length=self._recent_sum / rows if rows else 0.0,
            seconds=dict(self.seconds),
            first_token=self.first_token.frozen(),
            duration=self.duration.frozen(),
            queued=self.queued.frozen(),
            prefill=self.prefill.frozen(),
            decode=self.decode.frozen(),
            inference=self.inference.frozen(),
            prompt_length=self.prompt_length.frozen(),
            output_length=self.output_length.frozen(),
            longest_output=self.longest_output.frozen(),
            max_tokens=self.max_tokens.frozen(),
            choices=self.choices.frozen(),
            by_source=tuple(
                SourceCount(source_name(source), depth, verified, accepted)
                for (source, depth), (verified, accepted) in sorted(self._by_source.items())
            ),
            step_seconds=self.step_seconds.frozen(),
            step_nodes=self.step_nodes.frozen(),
        )
