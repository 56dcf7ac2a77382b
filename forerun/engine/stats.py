"""Snapshots of the engine's counters, the only form in which they leave the engine."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from forerun.control.policy import Budget
from forerun.engine.adapter_counts import AdapterCount
from forerun.engine.metrics import EngineMetrics, LiveHistogram
from forerun.engine.request import Finish
from forerun.engine.store_stats import StoreStats
from forerun.speculative.tree import DraftSource


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by size.

    bounds  upper bounds, ascending
    counts  counts[i] values were <= bounds[i] and above the bound before; the last entry counts
            the rest
    total   sum of all values
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers of sequences and pages at one moment.

    granted  budgets of the last step that had decoding rows
    """

    waiting: int
    running: int
    pages: int
    pages_held: int
    pages_evictable: int
    granted: tuple[Budget, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Counts of draft tokens from one source at one depth (from 1): verified, and accepted."""

    source: str
    depth: int
    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the counts since the engine was created; times in seconds.

    finished           sequences by how they ended
    prompt_tokens      of admitted sequences; cached_tokens of them came from the prefix index
    output_tokens      tokens reported to clients
    steps, nodes       steps, and known tokens plus draft tokens that they ran; `carried` of the
                       steps began before the one before was finished (overlap.py)
    drafts             rows that carried draft tokens; draft tokens and accepted count theirs
    accepted_at        accepted_at[i] drafts had their draft token at depth i + 1 accepted
    acceptance_length  tokens per row that sampled, over the last rows (0 before the first)
    seconds            time of steps by stage: draft, verify, mask, accept, host
    first_token        from submission to the first decided token
    duration           from submission to the end
    queued, prefill, decode   of ended sequences: until a slot was free, from then to the first
                              decided token, from then to the end; `inference` is the last two
                              together
    prompt_length, output_length   tokens of ended sequences
    longest_output     tokens of the longest choice of ended requests
    max_tokens, choices   as requested
    by_source          verified and accepted draft tokens, by source and depth
    by_adapter         of every adapter that ended a sequence
    step_seconds, step_nodes   per step
    store              of the pages on disk; None without a page store
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
    by_adapter: tuple[AdapterCount, ...]
    step_seconds: Histogram
    step_nodes: Histogram
    store: StoreStats | None = None


def snapshot(
    metrics: EngineMetrics,
    load: Load,
    store: StoreStats | None = None,
    by_adapter: tuple[AdapterCount, ...] = (),
) -> Stats:
    """Return a copy of the counters as they are now.

    load               sequences and pages now
    store, by_adapter  as in Stats

    Can be called from any thread: a step that is being counted may be included in part.
    """
    recent = metrics.recent.copy()
    by_source = sorted(metrics.by_source.copy().items())
    accepted_at = Counter[int]()
    for (_, depth), (_, accepted) in by_source:
        accepted_at[depth] += accepted
    values: dict[str, Any] = {
        "load": load,
        "store": store,
        "draft_tokens": sum(verified for _, (verified, _) in by_source),
        "accepted": accepted_at.total(),
        "accepted_at": tuple(count for _, count in sorted(accepted_at.items()) if count),
        "acceptance_length": sum(recent) / len(recent) if recent else 0.0,
        "by_source": tuple(
            SourceCount(DraftSource(source).name.lower(), depth, verified, accepted)
            for (source, depth), (verified, accepted) in by_source
        ),
        "by_adapter": by_adapter,
    }
    names = [field.name for field in fields(Stats) if field.name not in values]
    return Stats(**values, **{name: _frozen(getattr(metrics, name)) for name in names})


def _frozen(value: Any) -> Any:
    if isinstance(value, LiveHistogram):
        return Histogram(value.bounds, tuple(value.counts), value.total)
    return copy(value)
