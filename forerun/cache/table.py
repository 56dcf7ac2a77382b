"""A sequence's page table: reserved, then committed or rolled back."""

from array import array

from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.types import Ints


class PageTable:
    """The pages of one sequence, in order of position.

        positions    0 ......... shared*size ......... length ......... reserved
                     | full, in the index | own, committed | own, tentative |

    length    positions whose keys and values are permanent
    reserved  positions that have a page: len(pages) * page_size
    pages     int32[W] page numbers, readable as a NumPy buffer
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._chain: list[CachedPage] = []
        self.pages = array("i")
        self.length = 0

    @property
    def reserved(self) -> int:
        """Positions that have a page, committed or not: len(pages) * page_size."""
        return len(self.pages) * self._index.page_size

    def start(self, tokens: Ints) -> int:
        """Hold the pages that the index knows of `tokens` int32[T]; how many tokens they contain.
        For an empty table only (AssertionError). They are this table's until `release`.
        """
        assert not self.pages, "a table starts once"
        self._chain = self._index.acquire(tokens)
        self.pages.extend(entry.page for entry in self._chain)
        self.length = len(self.pages) * self._index.page_size
        return self.length

    def reserve(self, tokens: int) -> bool:
        """Take pages for positions length .. length+tokens-1, valid until commit or rollback.
        False, and nothing changes, when there are not enough, evictable ones included.
        """
        missing = -(-(self.length + tokens) // self._index.page_size) - len(self.pages)
        if missing <= 0:
            return True
        taken = self._index.take(missing)
        if taken is None:
            return False
        self.pages.extend(taken)
        return True

    def commit(self, count: int, tokens: Ints) -> None:
        """The next `count` positions are permanent; `tokens` int32[T] is the whole text from
        position 0, as far as it is decided.

            0 ........ shared*size ........ length ........ length+count ... reserved
                       | newly full pages go to the index |

        A page that the index cannot tell from another yet, because the token after it is not
        decided, waits for the next commit.

        The index may replace a newly full page by an equal one it already has: numbers in `pages`
        can change, content cannot. Raises ValueError beyond what was reserved.
        """
        size, lookahead, end = self._index.page_size, self._index.lookahead, self.length + count
        if count < 0 or end > self.reserved:
            raise ValueError(f"commit to {end}, but only {self.reserved} positions are reserved")
        self.length = end
        for number in range(len(self._chain), min(end, len(tokens) - lookahead) // size):
            parent = self._chain[-1] if self._chain else self._index.root
            content = tokens[number * size : (number + 1) * size + lookahead]
            entry = self._index.insert(parent, content, self.pages[number])
            self._chain.append(entry)
            self.pages[number] = entry.page

    def rollback(self, growing: int = 0) -> None:
        """Release the pages beyond position length + `growing`; committed positions keep theirs."""
        needed = -(-(self.length + growing) // self._index.page_size)
        while len(self.pages) > needed:
            self._index.release(self.pages.pop())

    def release(self) -> None:
        """Release all pages; full ones stay known to the index. The table is empty again."""
        while self.pages:
            self._index.release(self.pages.pop())
        self._chain = []
        self.length = 0

    def check(self) -> None:
        """Prove that the ranges are in order and every page is held. Raises AssertionError."""
        shared = len(self._chain) * self._index.page_size
        assert shared <= self.length <= self.reserved, "ranges are out of order"
        assert [entry.page for entry in self._chain] == list(self.pages[: len(self._chain)])
        assert len(set(self.pages)) == len(self.pages), "a page appears twice in one table"
        pool = self._index.pool
        assert all(pool.references(page) > 0 for page in self.pages), "a page is not held"
