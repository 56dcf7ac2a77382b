"""Pages of sliding-window layers, of which there are fewer than of other pages, because those
behind every window are freed.

A layer with a window of w tokens reads the last w positions of a sequence and never those before
them. So its keys and values are in window pages: a page of the engine has at most one, which
executors find in one table. Other layers keep every page. A text that begins with cached pages can
continue after any of them whose window still has its pages.
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
    """The map from pages to window pages. A window page is in one of three states:

        free  assigned to no page
        held  by the sequences of one or several slots, which may still read it
        idle  by none, but a text may continue after it

    Texts continue where a prompt or a text ended and where texts diverge: the idle windows before
    such places are reclaimed last, the longest idle one first. The other windows of a long prompt
    are reclaimed before these, because otherwise one prompt would take all of them.

    A sequence holds the window pages that its next step may read and those that its last step
    wrote. An executor calls `begin` before every step, so that all pages that it reads and writes
    exist.

    of  int32[P] the window page of every page, -1 = none. Changes in place while executors use it
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.of: Ints = np.full(limits.pages, -1, np.int32)
        self._size, self._window = limits.page_size, limits.window
        self._free = list(range(limits.window_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page = [-1] * limits.window_pages  # The page of each window page.
        self._holders = [0] * limits.window_pages
        # By slot: window pages by their number in the sequence, ascending.
        self._held: defaultdict[int, dict[int, int]] = defaultdict(dict)
        # By slot: numbers of the pages before the prompt's end, and before the point where its text
        # parts from others.
        self._ends: dict[int, range] = {}
        self._parts: dict[int, range] = {}
        # Window pages before such a point.
        self._parting: set[int] = set()
        # By slot: number and ids of the pages that were read last.
        self._seen: dict[int, tuple[int, bytes]] = {}
        # By slot: the least number of positions that are permanent now or after the last step.
        self._lengths: dict[int, int] = {}

    def reusable_prefix_len(self, pages: Ints) -> int:
        """Return the number of tokens after which a text whose first pages int32[n] are cached can
        continue: the greatest whose window still has its pages.
        """
        gone = np.concatenate([[0], np.cumsum(self.of[pages] < 0)])
        ends = np.arange(len(pages) + 1)
        first = np.maximum(ends * self._size - self._window, 0) // self._size
        return int(np.flatnonzero(gone[first] == gone)[-1]) * self._size

    def needed(self, pages: int) -> range:
        """Return the numbers of the pages whose windows a text reads after its first `pages`
        pages.
        """
        return range(self._first(pages * self._size), pages)

    def restore(self, page: int) -> int | None:
        """Return an idle window page, to be filled by the caller, for a page that has none; None if
        none is free or idle.
        """
        if not self._free and not self._idle:
            return None
        own = self._take()
        self._link(page, own)
        self._drop(own, kept=True)
        return own

    def forget(self, page: int) -> None:
        """Free the window page of a page whose contents are replaced."""
        if (before := int(self.of[page])) < 0:
            return
        self._unlink(before)
        if before in self._idle:
            del self._idle[before]
            self._free.append(before)

    def open(self, slot_init: SlotInit) -> None:
        """Hold the window pages of its cached prefix that a slot's new sequence reads. Raises
        EngineError if one was freed.
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
        """Release the window pages of a slot's sequence."""
        for by_slot in (self._lengths, self._seen, self._ends, self._parts):
            by_slot.pop(slot, None)
        for page in self._held.pop(slot, {}).values():
            self._drop(page, kept=True)

    def begin(self, plan: Plan, trees: TreeBatch) -> None:
        """Hold the window pages that the rows of a step read, and assign pages for what they write.
        Raises EngineError if a page that is read was freed, or more sequences run than
        ExecutorLimits allows.
        """
        lengths = plan.kv_len.tolist()
        ends = plan.kv_len + np.maximum.reduceat(trees.depth, trees.start[:-1]) + 1
        self._hold(plan, lengths, ends.tolist())
        known = zip(plan.slots.tolist(), lengths, plan.known_counts, strict=True)
        self._lengths = {slot: length + count for slot, length, count in known}

    def begin_after(self, plan: Plan, ends: Ints) -> bool:
        """Do what `begin` does for a round that starts from a running one, so that only bounds of
        its lengths are known: it may read from the lower bound on and write up to the upper one.
        ends: as of Executor.begin_after. Returns False, and holds nothing, if the bounds are so far
        apart that other sequences would have too few pages.
        """
        least = [self._lengths[slot] for slot in plan.slots.tolist()]
        # A row whose text has ended runs its last token.
        most = np.minimum(plan.kv_len + plan.max_depth, ends) + 1
        if (most - np.array(least)).max() > MOST_PATH:
            return False
        self._hold(plan, least, most.tolist())
        return True

    def finish(self, plan: Plan, outcome: Outcome) -> None:
        """Record how many positions of its rows a finished step made permanent."""
        done = zip(plan.slots.tolist(), plan.kv_len.tolist(), outcome.committed(plan), strict=True)
        for slot, length, count in done:
            if slot in self._lengths:
                self._lengths[slot] = max(self._lengths[slot], length + count)

    def _hold(self, plan: Plan, lengths: list[int], ends: list[int]) -> None:
        """Hold the pages that rows read after their `lengths` positions, and assign pages for the
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
        """Hold the window pages that a slot's sequence reads after its first `length` positions, in
        pages int32[.], and release those before. Raises EngineError if a page was freed.
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
        """Return the number of the first page that is read after `length` positions, or by another
        text that continues after the full pages among them.
        """
        return max(length // self._size * self._size - self._window, 0) // self._size

    def _leave(self, slot: int, length: int) -> None:
        """Release the window pages that a slot's sequence no longer reads after `length`
        positions.
        """
        held, first = self._held[slot], self._first(length)
        while held and (number := next(iter(held))) < first:
            page = held.pop(number)
            if number in self._parts.get(slot, ()):
                self._parting.add(page)
            self._drop(page, page in self._parting or number in self._ends.get(slot, ()))

    def _known(self, page: int, own: int | None) -> int:
        """Return the held window page of a page whose contents are read. own: the sequence's, if
        the engine replaced another page of the same tokens by this one.
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
        """Assign window pages for the positions of whole pages after `length`, up to `end`."""
        held, first, last = self._held[slot], -(-length // self._size), -(-end // self._size)
        for number, page in enumerate(pages[first:last].tolist(), first):
            if page < 0:  # Draft tokens after the last page are never accepted.
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
        """Release a window page once; kept: another text may continue after it."""
        self._holders[held] -= 1
        if self._holders[held]:
            return
        if self._page[held] < 0:
            self._free.append(held)
        else:
            self._idle[held] = None
            self._idle.move_to_end(held, last=kept)

    def _link(self, page: int, held: int) -> None:
        """Assign window page `held` to a page and to no other."""
        before = int(self.of[page])
        if before == held:
            return
        self._unlink(held)
        self.forget(page)  # It may have had another.
        self.of[page], self._page[held] = held, page

    def _unlink(self, found: int) -> None:
        self._parting.discard(found)
        if (page := self._page[found]) >= 0:
            self.of[page] = self._page[found] = -1

    def check(self) -> None:
        """Raise AssertionError unless every window page is free, held or idle, and the table
        agrees.
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
