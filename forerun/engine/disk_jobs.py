"""What a page store has to do: pages to read and to write."""

from dataclasses import dataclass, field
from time import monotonic

from forerun.cache.prefix import CachedPage
from forerun.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Reading:
    """A sequence that waits for pages on disk.

    digests, keys  of its first pages, all of which are on disk; keys without the salt
    chain          entries of those that are in memory, held until it ends
    first          how many were in memory when it began
    usable         of these, those behind which the text could continue
    miss           why the store's thread found no more: see StoreStats.misses
    """

    sequence: Sequence
    digests: list[bytes]
    keys: list[bytes]
    deadline: float
    began: float = field(default_factory=monotonic)
    chain: list[CachedPage] = field(default_factory=list)
    first: int = 0
    usable: int = 0
    over: bool = False
    miss: str = ""


@dataclass(frozen=True, slots=True)
class Writing:
    """Pages of an ended sequence, and after how many of them another text may continue."""

    salt: bytes
    chain: list[CachedPage]
    ends: list[int]
