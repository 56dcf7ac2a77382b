"""Counters of a page store, for metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a page store since the engine was created.

    hits       sequences that got pages from disk
    tokens     of these pages
    misses     sequences that got none or not all, by reason: absent, corrupt, late (the disk was
               slower than computing the prompt), failed (it reported an error), full (no page was
               free)
    read_bytes, written_bytes  contents read and written
    dropped    pages that were not written: evicted before, or the disk failed
    pages      pages on disk now
    size       bytes of the folder
    seconds_saved  estimated time to compute those tokens, minus the time of reading them
    """

    hits: int
    tokens: int
    misses: dict[str, int]
    read_bytes: int
    written_bytes: int
    dropped: int
    pages: int
    size: int
    seconds_saved: float
