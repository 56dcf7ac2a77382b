"""The jobs of a page store's thread: pages to read and to write."""

from dataclasses import dataclass, field
from time import monotonic

from forerun.cache.prefix import CachedPage
from forerun.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Reading:
    """A sequence that waits for pages on disk.

    digests, keys  of its first pages, all of which are on disk; keys without the salt
    deadline, began  seconds on the monotonic clock
    chain          entries of those that are in memory, held until it ends
    first          how many were in memory when it began
    usable         after how many of these the text could already continue
    over           it has ended: nothing more is inserted
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
    """Pages of an ended sequence to write.

    ends  numbers of pages after which another text may continue
    """

    salt: bytes
    chain: list[CachedPage]
    ends: list[int]
