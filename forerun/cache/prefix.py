"""The prefix index: full pages found again by the tokens they contain.

A tree of entries, one per full page. The key of an entry is its parent entry together with the
page's own tokens, compared exactly (a dictionary of bytes): two texts can never be taken for
one another. Only full pages are shared, so a shared page is never written again.

A draft head keeps something in a page that depends on one token more: its entry for a position
is made of that position's feature and the token after it (drafters/model_drafter.py). Then the
token after the page belongs to the key as well.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from forerun.cache.pages import PagePool
from forerun.types import Ints


@dataclass(slots=True, eq=False)
class CachedPage:
    """One full page that is known by its content.

    key       the page's tokens, and `lookahead` more, as int32 bytes; "" for the root, which has no
              page (-1)
    children  entries of the pages that follow, by key
    """

    page: int
    key: bytes
    parent: "CachedPage | None"
    children: dict[bytes, "CachedPage"] = field(default_factory=dict)


class PrefixIndex:
    """Shares full pages between sequences and keeps unheld ones until memory is needed.

    Whoever holds an entry's page holds the pages of all its ancestors. From this follows that
    an entry becomes idle before its parent does, so the least recently used idle entry is
    always a leaf, and eviction is taking the first of one ordered dictionary.

    lookahead  tokens after a page that what it contains depends on, 0 or 1
    """

    def __init__(self, pool: PagePool, page_size: int, lookahead: int = 0) -> None:
        if not 1 <= page_size <= 256:
            raise ValueError(f"page size must be 1 to 256 tokens, not {page_size}")
        self.pool = pool
        self.page_size = page_size
        self.lookahead = lookahead
        self.root = CachedPage(page=-1, key=b"", parent=None)
        self._entries: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()

    @property
    def kept(self) -> int:
        """Pages that no sequence holds but whose content is known: they can be shared again, or
        evicted.
        """
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `take` can supply: free ones and kept ones."""
        return self.pool.free + len(self._idle)

    def acquire(self, tokens: Ints) -> list[CachedPage]:
        """Hold the longest known chain of full pages that `tokens` int32[T] begins with.

        The entries, first page first, at most (T - lookahead) // page_size; none where nothing is
        known. The caller holds one reference to each page until it releases it.
        """
        size, lookahead, node = self.page_size, self.lookahead, self.root
        found: list[CachedPage] = []
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        for start in range(0, len(tokens) - size - lookahead + 1, size):
            child = node.children.get(data[4 * start : 4 * (start + size + lookahead)])
            if child is None:
                break
            self._hold(child)
            found.append(child)
            node = child
        return found

    def insert(self, parent: CachedPage, tokens: Ints, page: int) -> CachedPage:
        """Make known that `page`, held by the caller, contains `tokens` int32[page_size +
        lookahead] after `parent`; the last `lookahead` of them follow the page.

        Returns the entry. Where an equal page is known already, the caller's reference moves to
        that one and `page` becomes free: two sequences that computed the same page end up with one.
        """
        key = np.ascontiguousarray(tokens, np.int32).tobytes()
        known = parent.children.get(key)
        if known is not None:
            self._hold(known)
            self.release(page)
            return known
        entry = CachedPage(page=page, key=key, parent=parent)
        parent.children[key] = entry
        self._entries[page] = entry
        return entry

    def take(self, count: int) -> list[int] | None:
        """Hold `count` pages without content, evicting the least recently used kept pages where too
        few are free. Page numbers; None, and nothing changes, when even that is not enough.
        """
        if count > self.available:
            return None
        while self.pool.free < count:
            self._evict()
        return self.pool.take(count)

    def release(self, page: int) -> None:
        """Drop one reference; the last leaves the page kept if its content is known, else free. A
        sequence releases its pages last to first. Raises ValueError where nobody holds the page.
        """
        if not self.pool.drop(page):
            return
        entry = self._entries.get(page)
        if entry is None:
            self.pool.put_back(page)
        else:
            self._idle[page] = entry

    def _hold(self, entry: CachedPage) -> None:
        self.pool.hold(entry.page)
        self._idle.pop(entry.page, None)

    def _evict(self) -> None:
        """Forget the least recently used kept page."""
        page, entry = self._idle.popitem(last=False)
        assert not entry.children, f"page {page} would be evicted before the pages after it"
        assert entry.parent is not None
        del entry.parent.children[entry.key]
        del self._entries[page]
        self.pool.put_back(page)

    def check(self) -> None:
        """Prove that every page is free, held or kept, and that the tree is sound. Raises
        AssertionError that says what is wrong. Reads all pages: for tests and idle moments.
        """
        self.pool.check()
        free, held, kept = self.pool.free, self.pool.held, self.kept
        total = self.pool.pages
        assert free + held + kept == total, (
            f"{free} free + {held} held + {kept} kept pages are not {total}"
        )
        known = len(self.root.children)
        for page, entry in self._entries.items():
            references, parent = self.pool.references(page), entry.parent
            assert entry.page == page and parent is not None
            assert parent.children.get(entry.key) is entry, f"page {page} is lost to its parent"
            assert (page in self._idle) == (references == 0), f"page {page}: idle list is wrong"
            if references and parent is not self.root:
                assert self.pool.references(parent.page), f"page {page} is held, its past is not"
            known += len(entry.children)
        assert known == len(self._entries), "entries in the tree and by page differ"
