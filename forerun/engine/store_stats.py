"""What a page store did, for metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a page store did since the engine was made.

    hits       sequences that got pages from disk; tokens: of these pages
    misses     sequences that got none or not all, by reason: absent, corrupt, late (the disk was
               slower than reading the prompt), failed (it reported an error), full (no page was
               free)
    dropped    pages that were not written: evicted before, or the disk failed
    size       bytes of the folder
    seconds_saved  what reading those tokens as prompts would have taken, less the time of the disk
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
