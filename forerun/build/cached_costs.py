"""Stores the step costs that earlier starts measured on this machine, in the cache directory:
timing takes half of a start.

A file holds what the last starts of one model and setting measured, at most STARTS of them, each
with its time. Once there are STARTS of them, their medians are used and no steps are timed: one
slow moment of the machine changes a median less than a single measurement. Steps are timed again
after SECONDS, or when anything that the file's name depends on changes.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from forerun.cache_dir import cache_dir, write_cached
from forerun.control.step_costs import StepCosts
from forerun.machine import cores

STARTS = 3
"""Number of measurements of which the medians are used."""
FILES = 64
"""Most files; the oldest are deleted."""
SECONDS = 7 * 86_400.0
"""Age at which a measurement no longer counts."""


def cached_or_measured(facts: Sequence[Any], measure: Callable[[], StepCosts]) -> StepCosts:
    """Return the medians of STARTS stored measurements. While there are fewer, return what
    `measure` returns, and store it unless other processes use the machine.

    facts  everything that step times depend on, as JSON values
    """
    name = sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]
    path = cache_dir() / "costs" / f"{name}.json"
    now = time.time()
    known = [entry for entry in _read(path) if 0.0 <= now - entry[0] < SECONDS]
    if len(known) >= STARTS:
        return medians([costs for _, costs in known])
    costs = measure()
    same = [entry for entry in known if entry[1].nodes == costs.nodes]
    with suppress(OSError):
        if not _busy():
            write_cached(path, msgspec.json.encode([*same, (now, costs)]), FILES)
    return costs


def medians(measured: Sequence[StepCosts]) -> StepCosts:
    """Return the medians of one or more measurements with the same counts of nodes; fields that are
    no times are the first one's.
    """
    first = measured[0]
    every = zip(*(costs.verify_ms for costs in measured), strict=True)
    middle = {
        name: median(getattr(costs, name) for costs in measured)
        for name in ("attend_ms", "draft_ms", "follow_ms")
    }
    return StepCosts(
        first.nodes,
        tuple(map(median, every)),
        **middle,
        drafts_in_step=first.drafts_in_step,
        padded=first.padded,
    )


def _busy() -> bool:
    """Return whether more processes are ready to run than there are cores. Raises OSError if the
    system does not say.
    """
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores()


def _read(path: Path) -> list[tuple[float, StepCosts]]:
    """Return the measurements in a file with their times; none if it cannot be read."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[tuple[float, StepCosts]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return entries if all(_sound(costs) for _, costs in entries) else []


def _sound(costs: StepCosts) -> bool:
    """Return whether there are as many times as counts, and all of them are valid times."""
    others = (costs.attend_ms, costs.draft_ms, costs.follow_ms)
    pairs = 2 <= len(costs.nodes) == len(costs.verify_ms)
    return pairs and min(costs.verify_ms) > 0.0 and min(others) >= 0.0
