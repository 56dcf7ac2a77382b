"""The page pool with its prefix index: which pages are free, how many sequences hold each of the
others, and which full pages can be looked up by the tokens they contain.

The index is a tree of entries, one per full page. The key of an entry is its parent entry together
with the page's own tokens, compared exactly (a dictionary of bytes), so two different texts never
match. Only full pages are shared, so a shared page is never written again; a text that differs
within a page gets a copy of it (`continue_within`). The first page's key begins with the text's
salt, so texts of different salts share no page. The salt covers a request's `cache_salt` and its
adapter (`EngineOptions.salt`).

An entry of a draft head's cache depends on one more token: the entry of a position combines that
position's feature and the token after it (drafters/model_drafter.py). Then the key includes that
token, too.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from forerun.types import Ints


@dataclass(slots=True, eq=False)
class CachedPage:
    """One full page in the index.

    key       the page's tokens, and `lookahead` more, as int32 bytes; for a text's first page
              after its salt; b"" for the root, which has no page (-1)
    tenant    of the text that first inserted it (SlotInit.tenant): only texts of that tenant may
              continue within it
    children  entries of the pages that follow, by key
    """

    page: int
    key: bytes
    parent: "CachedPage | None"
    tenant: int = 0
    children: dict[bytes, "CachedPage"] = field(default_factory=dict)


class PrefixIndex:
    """The pool of P page numbers: allocated, shared between sequences, cached until memory is
    needed. Their contents belong to the executor. A page is in one of three states:

        free       in no table, and its content is undefined
        held       in the tables of one or several sequences, which are counted
        evictable  in no table, but in the index: it can be shared again, or evicted

    A sequence that holds an entry's page holds the pages of all its ancestors. Hence an entry
    becomes idle before its parent does, so the least recently used idle entry is always a leaf, and
    eviction takes the first of one ordered dictionary.

    pages      P, at least 1 (ValueError)
    page_size  tokens of a page, 1 to 256 (ValueError)
    lookahead  tokens after a page that its content depends on, 0 or 1
    """

    def __init__(self, pages: int, page_size: int, lookahead: int = 0) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, not {pages}")
        if not 1 <= page_size <= 256:
            raise ValueError(f"page size must be 1 to 256 tokens, not {page_size}")
        self.pages, self.page_size, self.lookahead = pages, page_size, lookahead
        self.root = CachedPage(page=-1, key=b"", parent=None)
        self._entries: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()  # Entries of evictable pages.
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def evictable(self) -> int:
        """The number of evictable pages."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """The number of held pages."""
        return self.pages - self.available

    @property
    def available(self) -> int:
        """The number of pages that `take` can supply: free ones and evictable ones."""
        return len(self._free) + len(self._idle)

    def references(self, page: int) -> int:
        """Return how many tables hold `page`, from 0 to P-1."""
        return self._references[page]

    def contains(self, entry: CachedPage) -> bool:
        """Return whether an entry that was in the index is still there."""
        return self._entries.get(entry.page) is entry

    def acquire(self, tokens: Ints, salt: bytes = b"") -> list[CachedPage]:
        """Hold the longest known chain of full pages at the start of `tokens` int32[T].

        Returns the entries, first page first, at most (T - lookahead) // page_size, maybe none. The
        caller holds one reference to each page until it releases it.
        """
        size, lookahead, node = self.page_size, self.lookahead, self.root
        entries: list[CachedPage] = []
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        for start in range(0, len(tokens) - size - lookahead + 1, size):
            child = node.children.get(salt + data[4 * start : 4 * (start + size + lookahead)])
            if child is None:
                break
            self.hold(child.page)
            entries.append(child)
            node, salt = child, b""
        return entries

    def insert(
        self,
        parent: CachedPage,
        tokens: Ints,
        page: int,
        salt: bytes,
        tenant: int,
    ) -> CachedPage:
        """Register that `page`, held by the caller, contains `tokens` int32[page_size + lookahead]
        after `parent`, in a tenant's text with this salt; the last `lookahead` follow the page.

        Returns the entry. If an equal page is known already, the caller's reference moves to it and
        `page` becomes free: two sequences that computed the same page end up with one.
        """
        content = np.ascontiguousarray(tokens, np.int32).tobytes()
        key = salt + content if parent is self.root else content
        known = parent.children.get(key)
        if known is not None:
            self.hold(known.page)
            self.release(page)
            return known
        entry = CachedPage(page=page, key=key, parent=parent, tenant=tenant)
        parent.children[key] = self._entries[page] = entry
        return entry

    def take(self, count: int) -> list[int] | None:
        """Hold `count` pages without content, evicting the least recently used evictable pages if
        too few are free. Returns page numbers; None, and nothing changes, if even that is not
        enough.
        """
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def release(self, page: int) -> None:
        """Drop one reference. After the last one the page is evictable if it is in the index, else
        free. A sequence releases its pages last to first. Raises ValueError if no table holds the
        page.
        """
        if self._references[page] < 1:
            raise ValueError(f"page {page} was released, but no table holds it")
        self._references[page] -= 1
        if not self._references[page]:
            entry = self._entries.get(page)
            if entry is None:
                self._free.append(page)
            else:
                self._idle[page] = entry

    def hold(self, page: int) -> None:
        """Add a reference to a page that is held or evictable."""
        self._references[page] += 1
        self._idle.pop(page, None)

    def _evict(self) -> None:
        """Evict the least recently used evictable page."""
        page, entry = self._idle.popitem(last=False)
        assert not entry.children, f"page {page} would be evicted before the pages after it"
        assert entry.parent is not None
        del entry.parent.children[entry.key]
        del self._entries[page]
        self._free.append(page)

    def check(self) -> None:
        """Check that every page is free, held or evictable, and that the tree is consistent. Raises
        AssertionError with the fault. Reads all pages: for tests and idle moments.
        """
        free, held = set(self._free), [page for page, n in enumerate(self._references) if n]
        assert min(self._references) >= 0, "a page has fewer than no references"
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert all(0 <= page < self.pages for page in free), "a free page does not exist"
        assert free.isdisjoint(held), f"pages {free.intersection(held)} are free and held at once"
        assert len(free) + len(held) + self.evictable == self.pages, (
            f"{len(free)} free + {len(held)} held + {self.evictable} evictable pages are not "
            f"{self.pages}"
        )
        known = len(self.root.children)
        for page, entry in self._entries.items():
            references, parent = self._references[page], entry.parent
            assert entry.page == page and parent is not None
            assert parent.children.get(entry.key) is entry, f"page {page} is lost to its parent"
            assert (page in self._idle) == (references == 0), f"page {page}: idle list is wrong"
            if references and parent is not self.root:
                assert self._references[parent.page], f"page {page} is held, its past is not"
            known += len(entry.children)
        assert known == len(self._entries), "entries in the tree and by page differ"
