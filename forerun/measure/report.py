"""Summaries of timings as numbers and tables."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from forerun.measure.client import Timing
from forerun.measure.paired import Interval, median_interval

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Level:
    """One side at one concurrency: medians over repeats. Times in milliseconds, as percentiles by
    name ("p50", "p90", "p99").

    first_ms      time to first text
    per_token_ms  mean time per token after the first text, over requests
    gap_ms        time between pieces of text
    throughput    output tokens per second, all requests together
    answers_per_second, prompt_tokens  of answered requests; the latter as the server counts, in all
    """

    side: str
    at_once: int
    requests: int
    errors: int
    throughput: float
    answers_per_second: float
    tokens: int
    prompt_tokens: int
    first_ms: dict[str, float]
    per_token_ms: dict[str, float]
    gap_ms: dict[str, float]
    total_ms: dict[str, float]
    first_error: str | None


def one_repeat(side: str, at_once: int, timings: Sequence[Timing], seconds: float) -> Level:
    """Return the Level of one repeat: throughput over `seconds` of wall time, percentiles in
    milliseconds. Failed requests count only as errors.
    """
    good = [timing for timing in timings if timing.error is None]
    tokens = sum(timing.tokens for timing in good)
    return Level(
        side=side,
        at_once=at_once,
        requests=len(timings),
        errors=len(timings) - len(good),
        throughput=tokens / seconds if seconds > 0 else 0.0,
        answers_per_second=len(good) / seconds if seconds > 0 else 0.0,
        tokens=tokens,
        prompt_tokens=sum(timing.prompt_tokens for timing in good),
        first_ms=percentiles([timing.first for timing in good]),
        per_token_ms=percentiles([t.per_token for t in good if t.per_token is not None]),
        gap_ms=percentiles([gap for timing in good for gap in timing.gaps]),
        total_ms=percentiles([timing.total for timing in good]),
        first_error=next((timing.error for timing in timings if timing.error), None),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return {"p50", "p90", "p99"} in milliseconds of values in seconds, by linear interpolation;
    {} without values.
    """
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds) * 1000.0, PERCENTILES)
    return {f"p{name}": float(value) for name, value in zip(PERCENTILES, values, strict=True)}


def median_of(repeats: Sequence[Level]) -> Level:
    """Return the Level of several repeats (at least one) of the same side and concurrency: each
    number is the median over the repeats that have it; requests, errors and tokens are summed.
    """
    first = repeats[0]

    def middle(name: str) -> dict[str, float]:
        columns = [getattr(level, name) for level in repeats if getattr(level, name)]
        keys = columns[0] if columns else {}
        return {key: statistics.median(column[key] for column in columns) for key in keys}

    return Level(
        side=first.side,
        at_once=first.at_once,
        requests=sum(level.requests for level in repeats),
        errors=sum(level.errors for level in repeats),
        throughput=statistics.median(level.throughput for level in repeats),
        answers_per_second=statistics.median(level.answers_per_second for level in repeats),
        tokens=sum(level.tokens for level in repeats),
        prompt_tokens=sum(level.prompt_tokens for level in repeats),
        first_ms=middle("first_ms"),
        per_token_ms=middle("per_token_ms"),
        gap_ms=middle("gap_ms"),
        total_ms=middle("total_ms"),
        first_error=next((level.first_error for level in repeats if level.first_error), None),
    )


def ratio_of(on: Sequence[Level], off: Sequence[Level]) -> Interval | None:
    """Return the median and interval of one side's throughput over the other's, repeat by repeat;
    None if one was zero.
    """
    pairs = list(zip(on, off, strict=True))
    if any(not (one.throughput and other.throughput) for one, other in pairs):
        return None
    return median_interval([one.throughput / other.throughput for one, other in pairs])


def worded(ratio: Interval) -> str:
    """Return a ratio as text; without an interval if there was only one pair."""
    if not ratio.confidence:
        return f"{ratio.middle:.2f}, of one pair"
    return f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}, {ratio.confidence:.0%} sure)"


def columns(title: str, names: Sequence[str], left: int = 1, caption: str | None = None) -> Table:
    """Return an empty table with these columns, the first `left` of them left-aligned. In a narrow
    terminal headings are wrapped between words, and none is cut.
    """
    drawn = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, name in enumerate(names):
        longest = max(map(len, name.split()))
        drawn.add_column(name, justify="left" if place < left else "right", min_width=longest)
    return drawn


def table(levels: Sequence[Level], title: str) -> Table:
    """Return a table of levels for the terminal, at least 80 columns wide; times as p50 / p99 in
    milliseconds.
    """
    caption = "times: p50 / p99 in ms; medians over repeats"
    names = (
        "speculation",
        "at once",
        "req/s",
        "tokens/s",
        "first text",
        "per token",
        "between texts",
        "failed",
    )
    drawn = columns(title, names, caption=caption)
    for level in levels:
        drawn.add_row(
            level.side,
            str(level.at_once),
            f"{level.answers_per_second:.2f}",
            f"{level.throughput:.1f}",
            _pair(level.first_ms),
            _pair(level.per_token_ms),
            _pair(level.gap_ms),
            f"{level.errors} of {level.requests}",
        )
    return drawn


def _pair(values: dict[str, float]) -> str:
    return f"{values['p50']:.1f} / {values['p99']:.1f}" if values else "-"


def as_dict(levels: Sequence[Level], facts: dict[str, Any]) -> dict[str, Any]:
    """Return `facts` about the measurement and the levels' fields as JSON values."""
    return facts | {"levels": [asdict(level) for level in levels]}
