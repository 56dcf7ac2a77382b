"""Admission: decides which waiting sequences get a slot, and when. Runs only if a sequence
waits.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import islice
from time import monotonic

import numpy as np

from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.cache.table import PageTable
from forerun.control.policy import Budget
from forerun.engine.chunked_prefill import PromptPace, PromptShares
from forerun.engine.disk_pages import DiskPages
from forerun.engine.sequence import Sequence
from forerun.engine.stats import Load
from forerun.interface.executor import ExecutorLimits
from forerun.types import Ints

MOST_COMPARED = 1024
"""Most pages after one page that are compared, the newest: .3 ms if all begin with the same token,
and 3.3 for 10,000 (one core of an EPYC). Computing a token of the default model takes 5 ms or more.
"""


class Admission:
    """Slots, pages, and the sequences that wait for them or have them.

    waiting, running  in order of arrival
    free_slots  slots without a sequence
    num_logits_rows  most nodes of a step that may have logits
    disk     pages on disk; None without a page store
    pools    whether any request so far wanted an embedding
    ready    whether a sequence with a slot can take part in the next step
    reusable_prefix_len  (cached tokens, salt, pages) -> how many tokens a sequence can skip, as
                         Executor.reusable_prefix_len
    copy_page  as Executor.copy_page
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        features: bool,
        ready: Callable[[Sequence], bool],
        reusable_prefix_len: Callable[[Ints, bytes, Ints], int],
        copy_page: Callable[[int, int], bool],
    ) -> None:
        self.limits, self.num_logits_rows = limits, limits.scored_nodes
        self._ready, self._reusable_prefix_len = ready, reusable_prefix_len
        self._copy_page = copy_page
        self.index = PrefixIndex(limits.pages, limits.page_size, lookahead=int(features))
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.shares, self.pace = PromptShares(), PromptPace()
        self.disk: DiskPages | None = None
        self.pools = False
        # The budgets of the last step that had decoding rows.
        self._budgets: Several[Budget] = ()
        # Every running row needs a node and its logits in every step.
        self.free_slots = list(range(min(limits.slots, self.num_logits_rows)))[::-1]

    @property
    def context(self) -> int:
        """The longest sequence, in tokens, that fits the executor and the page pool."""
        return min(self.limits.context, self.limits.pages * self.limits.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence in its order of arrival, with an empty page table."""
        request = sequence.request
        self.pools = self.pools or sequence.pooled is not None
        sequence.table = PageTable(
            self.index, request.salt or request.cache_salt.encode(), request.tenant_key
        )
        insort(self.waiting, sequence, key=lambda s: s.order)

    def _admit(self) -> tuple[Sequence, ...]:
        """Move waiting sequences to free slots while this step's nodes and the pages suffice, then
        those whose prompts are short enough to go first (PromptShares). Returns the admitted ones.
        """
        opened: list[Sequence] = []
        nodes = sum(sequence.pending for sequence in self.running if self._ready(sequence))
        for sequence in tuple(self.waiting):
            if not self.free_slots:
                break
            if nodes >= self.limits.max_nodes:
                return (*opened, *self._admit_short())
            if self._awaits_pages(sequence):
                continue
            if not self._open(sequence):
                break
            opened.append(sequence)
            nodes += sequence.pending
        return tuple(opened)

    def _admit_short(self) -> list[Sequence]:
        """Admit sequences whose prompts cost less than any prompt that is being read, up to half of
        the nodes of a step.
        """
        reading = [sequence for sequence in self.running if sequence.pending > 1]
        lowest_cost = min(map(self.shares.cost, reading), default=0.0)
        room, opened = self.limits.max_nodes // 2, []
        for sequence in sorted(self.waiting, key=self.shares.cost):
            if not self.free_slots or room <= 0 or self.shares.cost(sequence) >= lowest_cost:
                break
            if self._awaits_pages(sequence):
                continue
            if not self._open(sequence):
                break
            opened.append(sequence)
            room -= sequence.pending
        return opened

    def _open(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to a free slot. Returns False, and changes nothing, if there are
        too few pages.
        """
        if not self._windows_fit(sequence) or not self._reserve_prompt(sequence):
            return False
        self.waiting.remove(sequence)
        sequence.slot = self.free_slots.pop()
        sequence.admitted = sequence.admitted or monotonic()
        insort(self.running, sequence, key=lambda s: s.order)
        return True

    def _awaits_pages(self, sequence: Sequence) -> bool:
        """Return whether to wait for a page of this sequence's prefix: a running sequence computes
        it, or it is read from disk.

        This concerns other choices of the same request, and a new system prompt that many requests
        share.
        """
        if not sequence.reuses_prefix:
            return False
        size = self.index.page_size
        for other in self.running:
            alike = other.table.salt == sequence.table.salt
            if alike and other.pending > 1 and self._ready(other):
                shared = common(other.tokens, sequence.tokens[:-1]) // size * size
                if shared > other.table.length:
                    return True
        return self.disk is not None and self.disk.awaits(sequence)

    def _reserve_prompt(self, sequence: Sequence) -> bool:
        """Reserve pages for all known tokens, cached or new, and leave one for each running row to
        grow.
        """
        table, index, reuses = sequence.table, self.index, sequence.reuses_prefix
        # At least one token must run, or there are no logits to sample from.
        known = sequence.tokens[: sequence.total - 1 + index.lookahead]
        if reuses:
            table.start(known)
            sequence.shared = max(table.length, sequence.stored)
            cached, pages = sequence.tokens[: table.length], np.array(table.pages, np.int32)
            table.shorten(self._reusable_prefix_len(cached, table.salt, pages))
        missing = -(-(sequence.total - table.reserved) // index.page_size)
        if missing + len(self.running) > index.available:
            table.release()
            return False
        reserved = table.reserve(sequence.pending)
        if reuses and reserved:
            continue_within(index, table, known, self._copy_page)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = table.length
        return reserved

    def _windows_fit(self, *more: Sequence) -> bool:
        """Return whether the window pages suffice for the running sequences and `more`."""
        return self.limits.windows_fit(each.total for each in (*self.running, *more))

    def wait(self, seconds: float, otherwise: Callable[[float], None]) -> None:
        """Block while no sequence is ready, for at most `seconds`: until pages were read from disk
        if a sequence waits for any, else by calling `otherwise`.
        """
        if self.disk is not None and self.disk.reading:
            self.disk.wait(seconds)
        else:
            otherwise(seconds)

    def load(self, entering: int) -> Load:
        """Return the current counts of waiting and running sequences and of pages.

        entering  submitted sequences that are not in the queue yet; they count as waiting
        """
        return Load(
            waiting=len(self.waiting) + entering,
            running=len(self.running),
            pages=self.limits.pages,
            pages_held=self.limits.pages - self.index.available,
            pages_evictable=self.index.evictable,
            granted=tuple(self._budgets),
        )


def common(one: Ints, two: Ints) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    length = min(len(one), len(two))
    different = np.flatnonzero(one[:length] != two[:length])
    return int(different[0]) if len(different) else length


def continue_within(
    index: PrefixIndex, table: PageTable, tokens: Ints, copy: Callable[[int, int], bool]
) -> None:
    """Continue a text in the middle of a cached page, where it differs from the text that the page
    holds: copy the page and make the positions that agree permanent. (Only full pages can be
    shared.)

    Call it after `table.start` and `table.reserve`, before anything else takes or releases pages.
    Only a page of the same tenant is continued: the number of cached tokens shows whether a text
    was sent before, and within a page an attacker could guess it token by token.

    tokens  int32[T] as for `start`
    copy    (page, page of the table) -> whether the content of the first was copied to the second;
            if not, nothing changes
    """
    chain = table.chain
    tokens, salt = tokens[table.length :], b"" if chain else table.salt
    parent = chain[-1] if chain else index.root
    page, count = partial_match(index, parent, tokens, salt, table.tenant)
    if count > 0 and copy(page, table.pages[len(chain)]):
        table.length += count
        index.hold(page)  # It counts as used.
        index.release(page)


def partial_match(
    index: PrefixIndex, parent: CachedPage, tokens: Ints, salt: bytes = b"", tenant: int = 0
) -> tuple[int, int]:
    """Return (page, count): of the MOST_COMPARED newest pages after `parent`, the one that begins
    with most of `tokens` int32[T], and how many of its positions are valid for them, at most min(T
    - lookahead, page_size). Returns (-1, 0) if there is none.

    salt    of the text, if `parent` is the root
    tenant  of the text, and of the page
    """
    lookahead = index.lookahead
    prefix = np.ascontiguousarray(tokens[: index.page_size + lookahead], np.int32)
    if len(prefix) <= lookahead:
        return -1, 0
    begin, size = salt + prefix[: 1 + lookahead].tobytes(), 4 * (index.page_size + lookahead)
    alike = {
        key[len(salt) :]: child.page
        for key, child in islice(reversed(parent.children.items()), MOST_COMPARED)
        if child.tenant == tenant and len(key) == len(salt) + size and key.startswith(begin)
    }
    if not alike:
        return -1, 0
    keys = np.frombuffer(b"".join(alike), np.int32).reshape(len(alike), -1)
    counts = np.logical_and.accumulate(keys[:, : len(prefix)] == prefix, 1).sum(1)
    best = int(counts.argmax())
    return [*alike.values()][best], int(counts[best]) - lookahead
