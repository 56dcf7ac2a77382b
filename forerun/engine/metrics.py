"""The engine's counters. stats.py copies them into a frozen value."""

from bisect import bisect_left
from collections import deque
from time import monotonic

from forerun.control.report import STAGES, StepReport
from forerun.engine.request import Finish
from forerun.engine.sequence import Sequence
from forerun.interface.plan import Outcome
from forerun.speculative.tree import TreeBatch

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LENGTHS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
"""Bucket bounds for numbers of tokens, to 500,000."""
CHOICES = (1, 2, 5, 10, 20)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RECENT = 512
"""Rows over which the rolling acceptance length is averaged."""


class LiveHistogram:
    """Counts values into the buckets of a Histogram (stats.py) with these upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineMetrics:
    """The engine's counters. Written by the engine's thread; other threads may read them in the
    middle of an update.
    """

    def __init__(self) -> None:
        self.finished = dict.fromkeys(Finish, 0)
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.steps = self.carried = self.failed_steps = self.nodes = 0
        self.drafts = self.preemptions = 0
        self.seconds = dict.fromkeys((*STAGES, "host"), 0.0)
        self.first_token = LiveHistogram(SECONDS)
        self.duration = LiveHistogram(SECONDS)
        self.queued, self.prefill = LiveHistogram(SECONDS), LiveHistogram(SECONDS)
        self.decode, self.inference = LiveHistogram(SECONDS), LiveHistogram(SECONDS)
        self.prompt_length, self.output_length = LiveHistogram(LENGTHS), LiveHistogram(LENGTHS)
        self.longest_output, self.max_tokens = LiveHistogram(LENGTHS), LiveHistogram(LENGTHS)
        self.choices = LiveHistogram(CHOICES)
        # By DraftSource and depth: verified, accepted.
        self.by_source: dict[tuple[int, int], list[int]] = {}
        self.step_seconds = LiveHistogram(SECONDS)
        self.step_nodes = LiveHistogram(NODES)
        self.recent: deque[int] = deque(maxlen=RECENT)

    def rows(self, trees: TreeBatch, rows: list[int], outcome: Outcome) -> None:
        """Count the draft tokens of the given rows of a step by source, depth and acceptance. Every
        given row must have sampled.
        """
        drafted = outcome.n_draft_tokens.tolist()
        self.recent.extend(outcome.n_tokens[rows].tolist())
        if not any(drafted):
            return
        drafting = [row for row in rows if drafted[row]]
        self.drafts += len(drafting)
        roots, depth, nodes = trees.roots.tolist(), trees.depth.tolist(), trees.start.tolist()
        accepted = set(outcome.accepted.tolist())
        for row in drafting:
            root, end = roots[row], nodes[row + 1]
            sources = trees.drafts[row].sources() if trees.drafts else [0] * (end - root - 1)
            for node, source in zip(range(root + 1, end), sources, strict=True):
                counted = self.by_source.setdefault((source, depth[node] - depth[root]), [0, 0])
                counted[0] += 1
                counted[1] += node in accepted

    def ended(self, sequence: Sequence, finish: Finish) -> None:
        """Count the lengths of an ended sequence, and the time that it spent waiting, in prefill
        and in decoding.
        """
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
        """Count a finished step."""
        self.steps += 1
        self.carried += report.carried
        self.nodes += report.nodes
        self.step_nodes.add(report.nodes)
        self.step_seconds.add(sum(report.ms.values()) / 1000.0)
        for stage, ms in report.ms.items():
            self.seconds[stage] += ms / 1000.0
