"""What a text needs beside its pages to continue behind them, on disk: recurrent states at their
ends, or what layers that see a window keep of the last of them.
"""

from dataclasses import dataclass
from typing import Protocol

from forerun.cache.store import PageStore
from forerun.interface.executor import StateContents, WindowContents
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class CachedText:
    """A text that fills whole pages.

    tokens  int32[T]
    pages   where they are in memory, the first page first; -1 for one that was evicted
    """

    tokens: Ints
    pages: Ints
    salt: bytes


class DiskRecords(Protocol):
    """Records of what texts need beside pages; each has the digest of a page, and these have
    numbers in their text.
    """

    store: PageStore

    def usable(self, text: CachedText) -> int:
        """Return behind how many of its pages a text can continue with what is in memory."""
        ...

    def needed(self, pages: int) -> range:
        """Return the numbers whose records a text needs to continue behind its first `pages`."""
        ...

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of what is worth writing; ends: behind
        as many pages texts may continue.
        """
        ...

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return what the executor has; None if it has it no more."""
        ...

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Give the executor what `read` returned. Returns False if there is no room."""
        ...


@dataclass(frozen=True, slots=True)
class DiskStates(DiskRecords):
    """Recurrent states: that after a page has its number."""

    store: PageStore
    contents: StateContents
    page_size: int

    def usable(self, text: CachedText) -> int:
        """Return after how many pages of the text its last state stands; 0 without one."""
        lengths = self.contents.state_lengths(text.tokens, text.salt)
        return max(lengths, default=0) // self.page_size

    def needed(self, pages: int) -> range:
        """Return the number of the last page."""
        return range(pages - 1, pages)

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of all states: the executor has few."""
        lengths = self.contents.state_lengths(text.tokens, text.salt)
        return [length // self.page_size - 1 for length in lengths]

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return the state after a page."""
        return self.contents.read_state(self._until(text, number), text.salt)

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Write the state after a page."""
        return self.contents.write_state(self._until(text, number), content, text.salt)

    def _until(self, text: CachedText, number: int) -> Ints:
        return text.tokens[: (number + 1) * self.page_size]


@dataclass(frozen=True, slots=True)
class DiskWindows(DiskRecords):
    """What layers that see a window keep of pages."""

    store: PageStore
    contents: WindowContents
    page_size: int

    def usable(self, text: CachedText) -> int:
        """Return behind how many pages the last whole window lies."""
        return self.contents.reusable_prefix_len(text.pages) // self.page_size

    def needed(self, pages: int) -> range:
        """Return the numbers of the pages in the window."""
        return self.contents.needed(pages)

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of pages in whole windows before `ends`."""
        windows = [self.needed(end) for end in ends]
        whole = [each for each in windows if all(self._has(text, number) for number in each)]
        return sorted({number for each in whole for number in each})

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return what is kept of a page."""
        page = int(text.pages[number])
        return self.contents.read_window(page) if page >= 0 else None

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Write what is kept of a page."""
        return self.contents.write_window(int(text.pages[number]), content)

    def _has(self, text: CachedText, number: int) -> bool:
        page = int(text.pages[number])
        return page >= 0 and self.contents.has_window(page)
