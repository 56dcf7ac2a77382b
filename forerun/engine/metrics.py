"""Plain counters of what the engine did. Fields that do not begin with _ are those of Stats."""

from bisect import bisect_left
from collections import deque
from copy import copy
from time import monotonic
from typing import Any

from forerun.control.report import STAGES, StepReport
from forerun.engine.request import Finish
from forerun.engine.sequence import Sequence
from forerun.engine.stats import Histogram, Load, SourceCount, Stats
from forerun.interface.plan import Outcome
from forerun.speculative.tree import DraftSource, TreeBatch
from forerun.types import Ints

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LENGTHS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""Bounds for numbers of tokens, to 500,000."""
CHOICES = (1, 2, 5, 10, 20)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RECENT = 512
"""Rows over which the rolling acceptance length is taken."""


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
        self._by_source: dict[tuple[DraftSource, int], list[int]] = {}
        self.step_seconds = _Growing(SECONDS)
        self.step_nodes = _Growing(NODES)
        self._recent: deque[int] = deque(maxlen=RECENT)

    def row(self, trees: TreeBatch, row: int, outcome: Outcome) -> None:
        """One row of a step sampled."""
        draft_tokens = int(outcome.n_draft_tokens[row])
        accepted = len(outcome.output_tokens[row]) - 1
        self._recent.append(accepted + 1)
        if not draft_tokens:
            return
        self.drafts += 1
        self.draft_tokens += draft_tokens
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1
        self._count_sources(trees, row, outcome.paths[row])

    def _count_sources(self, trees: TreeBatch, row: int, path: Ints) -> None:
        """Who proposed the row's draft tokens, and which of them were accepted: nodes `path`."""
        root = trees.root(row)
        depth = (trees.depth[root + 1 : trees.start[row + 1]] - trees.depth[root]).tolist()
        sources = [DraftSource.UNKNOWN] * len(depth)
        if trees.drafts:
            sources = trees.drafts[row].sources()
        places = list(zip(sources, depth, strict=True))
        for place in places:
            self._by_source.setdefault(place, [0, 0])[0] += 1
        for node in path.tolist():
            self._by_source[places[node - root - 1]][1] += 1

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
        self.carried += report.carried
        self.nodes += report.nodes
        self.step_nodes.add(report.nodes)
        self.step_seconds.add(report.total_ms / 1000.0)
        for stage, ms in report.ms.items():
            self.seconds[stage] += ms / 1000.0

    def snapshot(self, load: Load) -> Stats:
        """The counters as they are now, as a value of their own; load: what runs and waits."""
        recent = self._recent.copy()
        counted: dict[str, Any] = {
            name: value.frozen() if isinstance(value, _Growing) else copy(value)
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "accepted_at"
        }
        by_source = sorted(self._by_source.copy().items())
        return Stats(
            load=load,
            accepted_at=tuple(self.accepted_at),
            acceptance_length=sum(recent) / len(recent) if recent else 0.0,
            by_source=tuple(
                SourceCount(source.name.lower(), depth, verified, accepted)
                for (source, depth), (verified, accepted) in by_source
            ),
            **counted,
        )
