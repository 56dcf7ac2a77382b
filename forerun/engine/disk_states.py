"""The states on disk that a text needs besides its pages to continue after them: recurrent ones, or
the keys and values that sliding-window layers hold for its last pages.
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
    pages   int32[.] its pages in memory, the first one first; -1 for one that was evicted
    salt    as in PageTable
    """

    tokens: Ints
    pages: Ints
    salt: bytes


class DiskRecords(Protocol):
    """The records that texts need besides pages. A record has the digest of a page in the store,
    and that page's number within the text.
    """

    store: PageStore

    def usable(self, text: CachedText) -> int:
        """Return after how many of its pages a text can continue with the records in memory."""
        ...

    def needed(self, pages: int) -> range:
        """Return the numbers of the records that a text needs to continue after its first `pages`
        pages.
        """
        ...

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of the records that are worth writing.

        ends  numbers of pages after which texts may continue
        """
        ...

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return the executor's record; None if it is gone."""
        ...

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Give the executor what `read` returned. Returns False if there is no room."""
        ...


@dataclass(frozen=True, slots=True)
class DiskStates(DiskRecords):
    """Records of recurrent states: the state after a page has the page's number."""

    store: PageStore
    contents: StateContents
    page_size: int

    def usable(self, text: CachedText) -> int:
        """Return the number of pages before the text's last stored state; 0 if there is none."""
        lengths = self.contents.state_lengths(text.tokens, text.salt)
        return max(lengths, default=0) // self.page_size

    def needed(self, pages: int) -> range:
        """Return the number of the last page."""
        return range(pages - 1, pages)

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of all states in memory, which are few."""
        lengths = self.contents.state_lengths(text.tokens, text.salt)
        return [length // self.page_size - 1 for length in lengths]

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return the state after page `number`; None if it is gone."""
        return self.contents.read_state(self._until(text, number), text.salt)

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Store the state after page `number`. Returns False if there is no room."""
        return self.contents.write_state(self._until(text, number), content, text.salt)

    def _until(self, text: CachedText, number: int) -> Ints:
        return text.tokens[: (number + 1) * self.page_size]


@dataclass(frozen=True, slots=True)
class DiskWindows(DiskRecords):
    """Records of the keys and values that sliding-window layers hold for a page."""

    store: PageStore
    contents: WindowContents
    page_size: int

    def usable(self, text: CachedText) -> int:
        """Return after how many pages the text can continue: those up to its last complete
        window.
        """
        return self.contents.reusable_prefix_len(text.pages) // self.page_size

    def needed(self, pages: int) -> range:
        """Return the numbers of the pages that windows cover after the first `pages` pages."""
        return self.contents.needed(pages)

    def worth(self, text: CachedText, ends: list[int]) -> list[int]:
        """Return the numbers of the pages in complete windows before `ends`."""
        windows = [self.needed(end) for end in ends]
        complete = [each for each in windows if all(self._has(text, number) for number in each)]
        return sorted({number for each in complete for number in each})

    def read(self, text: CachedText, number: int) -> bytes | None:
        """Return the window contents of page `number`; None if they were freed."""
        page = int(text.pages[number])
        return self.contents.read_window(page) if page >= 0 else None

    def write(self, text: CachedText, number: int, content: memoryview) -> bool:
        """Store the window contents of page `number`. Returns False if there is no room."""
        return self.contents.write_window(int(text.pages[number]), content)

    def _has(self, text: CachedText, number: int) -> bool:
        page = int(text.pages[number])
        return page >= 0 and self.contents.has_window(page)
