"""The page table of a sequence: pages are reserved, then committed or rolled back."""

from array import array

from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.types import Ints


class PageTable:
    """The pages of one sequence, in order of position.

        positions    0 ......... shared*size ......... length ......... reserved
                     | full, in the index | own, committed | own, tentative |

    length    positions whose keys and values are permanent
    reserved  positions that have a page: len(pages) * page_size. Changed here only
    pages     int32[W] page numbers, readable as a NumPy buffer
    salt      pages are shared only with sequences of the same salt
    tenant    and the sequence continues within a page only if it is of the same tenant
    """

    def __init__(self, index: PrefixIndex, salt: bytes = b"", tenant: int = 0) -> None:
        self._index, self.salt, self.tenant = index, salt, tenant
        self._chain: list[CachedPage] = []
        self.pages = array("i")
        self.length = 0
        self.page_size = index.page_size
        self._pages_changed()

    def _pages_changed(self) -> None:
        """Recompute what depends on this table's pages and on how many of them are in the index."""
        self.reserved = len(self.pages) * self.page_size
        # A commit up to this position fills a page, or is beyond the reserved ones.
        self._due = min((len(self._chain) + 1) * self.page_size, self.reserved + 1)

    @property
    def chain(self) -> list[CachedPage]:
        """A copy of the entries of its pages that are in the index, first page first."""
        return self._chain.copy()

    def start(self, tokens: Ints) -> int:
        """Acquire the pages of the longest prefix of `tokens` int32[T] that the index has; return
        how many tokens they contain. They are this table's until `release`. Raises AssertionError
        unless the table is empty.
        """
        assert not self.pages, "a table starts once"
        self._chain = self._index.acquire(tokens, self.salt)
        self.pages.extend(entry.page for entry in self._chain)
        self._pages_changed()
        self.length = self.reserved
        return self.length

    def shorten(self, length: int) -> None:
        """Release the shared pages after the first `length` positions, a multiple of the page size.
        Raises AssertionError unless called right after `start`.
        """
        assert self.length == self.reserved and length % self.page_size == 0
        del self._chain[length // self.page_size :]
        self.length = min(length, self.length)
        self.rollback()

    def reserve(self, tokens: int) -> bool:
        """Take pages for positions length .. length+tokens-1, valid until commit or rollback.
        Returns False, and changes nothing, if there are too few, evictable ones included.
        """
        missing = -(-(self.length + tokens) // self.page_size) - len(self.pages)
        if missing <= 0:
            return True
        taken = self._index.take(missing)
        if taken is None:
            return False
        self.pages.extend(taken)
        self._pages_changed()
        return True

    def commit(self, count: int, tokens: Ints) -> None:
        """Make the next `count` positions permanent; `tokens` int32[T] are all decided tokens.

            0 ........ shared*size ........ length ........ length+count ... reserved
                       | newly full pages go to the index |

        A page whose key needs the token after it waits for the next commit if that is undecided.

        The index may replace a newly full page by an equal one it already has: numbers in `pages`
        can change, content cannot. Raises ValueError beyond what was reserved.
        """
        size, lookahead, end = self._index.page_size, self._index.lookahead, self.length + count
        if self.length <= end < self._due:  # It fills no page.
            self.length = end
            return
        if count < 0 or end > self.reserved:
            raise ValueError(f"commit to {end}, but only {self.reserved} positions are reserved")
        self.length = end
        for number in range(len(self._chain), min(end, len(tokens) - lookahead) // size):
            parent = self._chain[-1] if self._chain else self._index.root
            content = tokens[number * size : (number + 1) * size + lookahead]
            entry = self._index.insert(parent, content, self.pages[number], self.salt, self.tenant)
            self._chain.append(entry)
            self.pages[number] = entry.page
        self._pages_changed()

    def rollback(self, growing: int = 0) -> None:
        """Release the pages after position length + `growing`; those of committed positions
        stay.
        """
        needed = -(-(self.length + growing) // self.page_size)
        while len(self.pages) > needed:
            self._index.release(self.pages.pop())
        self._pages_changed()

    def release(self) -> None:
        """Release all pages; full ones stay in the index. The table is empty again."""
        while self.pages:
            self._index.release(self.pages.pop())
        self._chain = []
        self.length = 0
        self._pages_changed()

    def check(self) -> None:
        """Raise AssertionError unless the ranges are in order and every page is held."""
        shared = len(self._chain) * self.page_size
        assert self.reserved == len(self.pages) * self.page_size, "pages are counted wrongly"
        assert self._due == min(shared + self.page_size, self.reserved + 1), "a commit is missed"
        assert shared <= self.length <= self.reserved, "ranges are out of order"
        assert [entry.page for entry in self._chain] == list(self.pages[: len(self._chain)])
        assert len(set(self.pages)) == len(self.pages), "a page appears twice in one table"
        assert all(self._index.references(page) > 0 for page in self.pages), "a page is not held"
