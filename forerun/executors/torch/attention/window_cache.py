"""The cache of keys and values of layers with window pages (executors/window_pages.py), separate
from that of layers that keep every page.

Both have the same scratch and page size. Plans, page tables and slots refer to the engine's pages;
a second table maps each of them to its window page. Slots:

    the engine's   0 .. P*page_size          | scratch | null
    window pages   0 .. W*page_size          | scratch | null: also for pages that were freed
"""

from dataclasses import replace

import numpy as np
import torch

from forerun.errors import EngineError
from forerun.executors.torch.attention.kv import KvShape, PagedCache, Slots
from forerun.interface.executor import ExecutorLimits
from forerun.types import AnyArray, Ints


class WindowCache(PagedCache):
    """A PagedCache with limits.window_pages pages.

    of      int32[P] the window page of every page, -1 = none: WindowPages.of, changed in place
    behind  difference between the engine's numbers of scratch and null slots and those here
    """

    def __init__(
        self, shape: KvShape, limits: ExecutorLimits, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, replace(limits, pages=limits.window_pages), device, dtype)
        self._pages = limits.pages  # In page tables.
        self.behind = limits.pages * limits.page_size - self.scratch_begin
        self.of: Ints = np.full(limits.pages, -1, np.int32)

    def slots_of(self, table: Ints, row: AnyArray | int, positions: AnyArray) -> Slots:
        """Return slots as PagedCache.slots_of does; the null slot if a page was freed."""
        return self.own(super().slots_of(table, row, positions))

    def own(self, slots: Slots) -> Slots:
        """Return int64[n], the slots here for `slots` int64[n] of the engine's pages and scratch;
        the null slot if a page was freed.
        """
        page, offset = np.divmod(slots, self.page_size)
        paged = page < self._pages
        held = self.of[np.where(paged, page, 0)].astype(np.int64)
        there = np.where(held < 0, self.null, held * self.page_size + offset)
        found: Slots = np.where(paged, there, slots - self.behind)
        return found

    def written(self, slots: Slots) -> Slots:
        """Return int64[n], the slots here for `slots` int64[n] that a step writes, as `own` does.
        Raises EngineError if one of their pages was freed.
        """
        found = self.own(slots)
        if (found == self.null).any():
            raise EngineError("a page of a window that was given back would be written")
        return found

    def link(self, changes: Ints) -> None:
        """Set the window pages of some pages: int32[n,2], page and window page."""
        self.of[changes[:, 0]] = changes[:, 1]

    def table(self, table: Ints) -> Ints:
        """Return int32[B,W], the window pages for a page table int32[B,W]; arbitrary for pages
        without one, which no window reads.
        """
        found: Ints = np.where(table < 0, 0, self.of[table]).clip(0)
        return found


def target_cache(
    shape: KvShape, limits: ExecutorLimits, device: torch.device, dtype: torch.dtype
) -> PagedCache:
    """Return the cache of a target: two caches if it has window pages."""
    if not shape.windowed:
        return PagedCache(shape, limits, device, dtype)

    def caches(windowed: bool) -> KvShape:
        pairs = zip(shape.caches, shape.windowed, strict=True)
        return KvShape(tuple(layer for layer, near in pairs if near == windowed))

    cache = PagedCache(caches(False), limits, device, dtype)
    cache.near = WindowCache(caches(True), limits, device, dtype)
    left = [iter(kind.layers) for kind in cache.kinds]
    own = [next(left[near]) for near in shape.windowed]
    places = range(len(own)) if shape.places is None else shape.places
    cache.layers = [own[place] for place in places]
    cache.kind_of = tuple(int(shape.windowed[place]) for place in places)
    cache.groups = cache.near.groups = max(kind.groups for kind in cache.kinds)
    return cache


def window_cache(cache: PagedCache) -> WindowCache:
    """Return the cache of the layers with window pages; there must be some (AssertionError)."""
    assert isinstance(cache.near, WindowCache), "no layer has window pages"
    return cache.near
