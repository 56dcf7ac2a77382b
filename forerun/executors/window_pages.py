"""Pages of the layers that see a window: fewer than other layers have, because what lies behind
every window is given back.

A layer with a window of w tokens reads the last w positions of a sequence and never those before
them. So its keys and values are in window pages: a page of the engine has at most one, which
executors find in one table. Other layers keep every page. A text that begins with cached pages can
continue behind any of them whose window still has its pages.
"""

from collections import OrderedDict, defaultdict

import numpy as np

from forerun.errors import EngineError
from forerun.interface.executor import MOST_PATH, ExecutorLimits
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


class WindowPages:
    """Which window page each page has. A window page is in one of three states:

        free  of no page
        held  by the sequences of one or several slots: they may still read it
        idle  by none, but a text may continue behind it

    Texts continue where a prompt or a text ended and where texts part: the idle windows before such
    places are taken last, the longest idle one first. What else lies in a long prompt is taken
    before, or one prompt would take every window.

    A sequence holds those that its next step may read, and those that its last step wrote. An
    executor calls `begin` before every step, so that all that it reads and writes is there.

    of  int32[P] the window page of every page, -1 = none. Executors read it while it changes
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.of: Ints = np.full(limits.pages, -1, np.int32)
        self._size, self._window = limits.page_size, limits.window
        self._free = list(range(limits.window_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page = [-1] * limits.window_pages  # Of which page each is.
        self._holders = [0] * limits.window_pages
        # By slot: window pages by their number in the sequence, ascending.
        self._held: defaultdict[int, dict[int, int]] = defaultdict(dict)
        # By slot: numbers of the pages before the prompt's end, and before the place where its text
        # parts from others.
        self._ends: dict[int, range] = {}
        self._parts: dict[int, range] = {}
        # Those of such a place.
        self._parting: set[int] = set()
        # By slot: number and pages of what was read last.
        self._seen: dict[int, tuple[int, bytes]] = {}
        # By slot: the least positions that are permanent, or will be behind the last step.
        self._lengths: dict[int, int] = {}

    def reusable_prefix_len(self, pages: Ints) -> int:
        """Return how many tokens of a text whose first pages int32[n] are cached a sequence may
        continue behind: the most whose window still has its pages.
        """
        gone = np.concatenate([[0], np.cumsum(self.of[pages] < 0)])
        ends = np.arange(len(pages) + 1)
        first = np.maximum(ends * self._size - self._window, 0) // self._size
        return int(np.flatnonzero(gone[first] == gone)[-1]) * self._size

    def needed(self, pages: int) -> range:
        """Return the numbers of the pages whose windows a text reads behind its first `pages`."""
        return range(self._first(pages * self._size), pages)

    def restore(self, page: int) -> int | None:
        """Return an idle window page, to be filled, for a page that has none; None if none is free
        or idle.
        """
        if not self._free and not self._idle:
            return None
        own = self._take()
        self._link(page, own)
        self._drop(own, kept=True)
        return own

    def forget(self, page: int) -> None:
        """Give back the window page of a page that gets another content."""
        if (before := int(self.of[page])) < 0:
            return
        self._unlink(before)
        if before in self._idle:
            del self._idle[before]
            self._free.append(before)

    def open(self, slot_init: SlotInit) -> None:
        """Hold what a sequence that takes a slot reads of its cached pages. Raises EngineError if a
        page was given back.
        """
        self.close(slot_init.slot)
        prompt, parts = slot_init.prompt_len, slot_init.shared
        # The same prompt again runs its last token.
        self._ends[slot_init.slot] = range(self._first(prompt - 1), prompt // self._size)
        parts = parts if parts > slot_init.cached else 0
        self._parts[slot_init.slot] = range(self._first(parts), parts // self._size)
        if len(slot_init.pages):
            self.read(slot_init.slot, slot_init.pages, slot_init.cached)

    def close(self, slot: int) -> None:
        """Give back what a slot's sequence holds."""
        for by_slot in (self._lengths, self._seen, self._ends, self._parts):
            by_slot.pop(slot, None)
        for page in self._held.pop(slot, {}).values():
            self._drop(page, kept=True)

    def begin(self, plan: Plan, trees: TreeBatch) -> None:
        """Hold what the rows of a step read, and take pages for what they write. Raises EngineError
        if a page that is read was given back, or more sequences run than ExecutorLimits allows for.
        """
        lengths = plan.kv_len.tolist()
        ends = plan.kv_len + np.maximum.reduceat(trees.depth, trees.start[:-1]) + 1
        self._hold(plan, lengths, ends.tolist())
        known = zip(plan.slots.tolist(), lengths, plan.known_counts, strict=True)
        self._lengths = {slot: length + count for slot, length, count in known}

    def begin_after(self, plan: Plan, ends: Ints) -> bool:
        """Do what `begin` does for a round that begins from a running one, of whose lengths only
        bounds are known: it may read from the least on and write up to the greatest. ends: as of
        Executor.begin_after. Returns False, and holds nothing, where these are so far apart that
        the pages of other sequences would be too few.
        """
        least = [self._lengths[slot] for slot in plan.slots.tolist()]
        # A row whose text has ended runs its last token.
        most = np.minimum(plan.kv_len + plan.max_depth, ends) + 1
        if (most - np.array(least)).max() > MOST_PATH:
            return False
        self._hold(plan, least, most.tolist())
        return True

    def finish(self, plan: Plan, outcome: Outcome) -> None:
        """Take note of how many positions of its rows a finished step made permanent."""
        done = zip(plan.slots.tolist(), plan.kv_len.tolist(), outcome.committed(plan), strict=True)
        for slot, length, count in done:
            if slot in self._lengths:
                self._lengths[slot] = max(self._lengths[slot], length + count)

    def _hold(self, plan: Plan, lengths: list[int], ends: list[int]) -> None:
        """Hold the pages that rows read behind their `lengths` positions, and take pages for the
        positions from there up to `ends`.
        """
        slots = plan.slots.tolist()
        for slot in self._lengths.keys() - {*slots}:
            self._leave(slot, self._lengths[slot])
        self.read_all(slots, plan.page_table, lengths)
        for slot, pages, length, end in zip(slots, plan.page_table, lengths, ends, strict=True):
            self._write(slot, pages, length, end)

    def read_all(self, slots: list[int], pages: Ints, lengths: list[int]) -> None:
        """Do what `read` does for R slots with pages int32[R,W]."""
        for slot, own, length in zip(slots, pages, lengths, strict=True):
            self.read(slot, own, length)

    def read(self, slot: int, pages: Ints, length: int) -> None:
        """Hold what a slot's sequence reads behind its first `length` positions, in pages int32[.],
        and give back what lies before. Raises EngineError if a page was given back.
        """
        held, first = self._held[slot], self._first(length)
        first = min(first, next(iter(held), first))
        seen = pages[first : -(-length // self._size)]
        now = first, seen.tobytes()
        if now != self._seen.get(slot):  # A page was added or replaced.
            self._seen[slot] = now
            for number, page in enumerate(seen.tolist(), first):
                own = held.get(number)
                if own is None or self._page[own] != page:
                    held[number] = self._known(page, own)
        self._leave(slot, length)

    def _first(self, length: int) -> int:
        """Return the number of the first page that is read behind `length` positions, or by another
        text that continues behind the whole pages that they fill.
        """
        return max(length // self._size * self._size - self._window, 0) // self._size

    def _leave(self, slot: int, length: int) -> None:
        """Give back what a slot's sequence no longer reads behind `length` positions."""
        held, first = self._held[slot], self._first(length)
        while held and (number := next(iter(held))) < first:
            page = held.pop(number)
            if number in self._parts.get(slot, ()):
                self._parting.add(page)
            self._drop(page, page in self._parting or number in self._ends.get(slot, ()))

    def _known(self, page: int, own: int | None) -> int:
        """Return the held window page of a page whose content is read. own: the sequence's, if the
        engine replaced another page of the same tokens by this one.
        """
        found = int(self.of[page])
        if found < 0:
            if own is None:
                raise EngineError(f"page {page} of a window was given back")
            self._link(page, own)
            return own
        self._holders[found] += 1
        self._idle.pop(found, None)
        if own is not None:
            self._unlink(own)
            self._drop(own, kept=False)
        return found

    def _write(self, slot: int, pages: Ints, length: int, end: int) -> None:
        """Have window pages for positions of whole pages behind `length`, up to `end`."""
        held, first, last = self._held[slot], -(-length // self._size), -(-end // self._size)
        for number, page in enumerate(pages[first:last].tolist(), first):
            if page < 0:  # Draft tokens behind the sequence's last page are never accepted.
                break
            if number not in held:
                held[number] = self._take()
            self._link(page, held[number])

    def _take(self) -> int:
        if self._free:
            taken = self._free.pop()
        elif self._idle:
            taken, _ = self._idle.popitem(last=False)
            self._unlink(taken)
        else:
            raise EngineError("no window page is free: more sequences run than were planned for")
        self._holders[taken] = 1
        return taken

    def _drop(self, held: int, kept: bool) -> None:
        """Hold a window page once less; kept: another text may continue behind it."""
        self._holders[held] -= 1
        if self._holders[held]:
            return
        if self._page[held] < 0:
            self._free.append(held)
        else:
            self._idle[held] = None
            self._idle.move_to_end(held, last=kept)

    def _link(self, page: int, held: int) -> None:
        """Make `held` the window page of a page, and of no other."""
        before = int(self.of[page])
        if before == held:
            return
        self._unlink(held)
        self.forget(page)  # In an earlier life it had another.
        self.of[page], self._page[held] = held, page

    def _unlink(self, found: int) -> None:
        self._parting.discard(found)
        if (page := self._page[found]) >= 0:
            self.of[page] = self._page[found] = -1

    def check(self) -> None:
        """Prove that every window page is free, held or idle, and that the table agrees. Raises
        AssertionError.
        """
        held = [page for one in self._held.values() for page in one.values()]
        everything = range(len(self._page))
        assert [held.count(page) for page in everything] == self._holders, "holders are miscounted"
        assert sorted({*held, *self._free, *self._idle}) == [*everything], "a window page is lost"
        assert len({*held}) + len(self._free) + len(self._idle) == len(everything)
        of = {page: int(found) for page, found in enumerate(self.of) if found >= 0}
        assert of == {page: found for found, page in enumerate(self._page) if page >= 0}
        assert all(self._page[page] < 0 for page in self._free), "a free window page is of a page"
        assert all(self._page[page] >= 0 for page in self._idle), "an idle one is of no page"
        for numbers in self._held.values():
            assert list(numbers) == sorted(numbers), "numbers are out of order"
