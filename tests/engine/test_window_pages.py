"""Window pages beside the prefix index and page tables, under arbitrary use: what a step reads is
what was written there for the same tokens.
"""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.errors import EngineError
from forerun.executors.window_pages import WindowPages
from forerun.interface.executor import ExecutorLimits, window_pages_of
from forerun.interface.plan import Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch

NODES, CONTEXT, SLOTS = 24, 120, 4


class Pool:
    """Sequences whose texts often agree. Each window page holds, by place, the text up to there."""

    def __init__(self, seed, size, window, windows, nodes=NODES):
        self.pick, self.size, self.window = Random(seed), size, window
        each = window_pages_of(CONTEXT, window, size)
        count = windows * each + -(-nodes // size)
        self.limits = ExecutorLimits(
            size, 2 * CONTEXT // size + 8, SLOTS, nodes, CONTEXT, 9, window=window,
            window_pages=count,
        )  # fmt: skip
        self.windows = WindowPages(self.limits)
        self.index = PrefixIndex(self.limits.pages, size)
        self.content = [[None] * size for _ in range(count)]
        self.running: dict[int, tuple[list[int], PageTable]] = {}
        self.hits = self.shortened = self.steps = 0

    def token(self, text):
        """Mostly what any other text has there, so that pages agree."""
        return self.pick.randrange(3) if self.pick.random() < 0.02 else len(text) % 3

    def text(self, length):
        made = []
        while len(made) < length:
            made.append(self.token(made))
        return made

    def place(self, table, position):
        page = self.windows.of[table.pages[position // self.size]]
        assert page >= 0, "a position that is needed was given back"
        return self.content[page], position % self.size

    def check(self):
        self.windows.check()
        self.index.check()
        for slot, (_, table) in self.running.items():
            first = max(table.length - self.window, 0) // self.size
            needed = range(first, -(-table.length // self.size))
            assert {*needed} <= self.windows._held[slot].keys(), "another may take what is needed"

    def fits(self, *more):
        return self.limits.windows_fit([*(len(text) for text, _ in self.running.values()), *more])

    def admit(self):
        free = [slot for slot in range(SLOTS) if slot not in self.running]
        text = self.text(self.pick.randint(1, CONTEXT // 2))
        if not free or not self.fits(len(text)):
            return
        table, slot = PageTable(self.index), self.pick.choice(free)
        whole = table.start(np.array(text[:-1], np.int32))
        pages = np.array(table.pages, np.int32)
        table.shorten(self.windows.reusable_prefix_len(pages))
        if not table.reserve(len(text) - table.length):
            table.release()
            return
        self.hits += table.length > 0
        self.shortened += table.length < whole
        pages = np.array(table.pages, np.int32)
        self.windows.open(
            SlotInit(slot, TokenText(text), len(text), Sampling(), cached=table.length, pages=pages)
        )
        self.running[slot] = text, table

    def end(self, slot):
        self.windows.close(slot)
        self.running.pop(slot)[1].release()

    def step(self):
        while not self.fits():
            self.end(max(self.running))
        slots = self.pick.sample(sorted(self.running), self.pick.randint(0, len(self.running)))
        rows, left = [], NODES
        for slot in slots:
            text, table = self.running[slot]
            known = min(len(text) - table.length, self.pick.randint(1, 12), left)
            if not known:
                continue
            depth = self.pick.randint(0, min(6, left - known, CONTEXT - len(text)))
            depth *= table.length + known == len(text)
            if table.reserve(known + depth):
                rows.append((slot, known, depth))
                left -= known + depth
        if rows:
            self.run(rows)

    def run(self, rows):
        kv_len = [self.running[slot][1].length for slot, _, _ in rows]
        chunks = [
            np.array(self.running[slot][0][length : length + known], np.int32)
            for (slot, known, _), length in zip(rows, kv_len, strict=True)
        ]
        tables = [self.running[slot][1] for slot, _, _ in rows]
        pages = np.full((len(rows), max(len(table.pages) for table in tables)), -1, np.int32)
        for line, table in zip(pages, tables, strict=True):
            line[: len(table.pages)] = table.pages
        nothing = np.zeros(len(rows), np.int32)
        plan = Plan(
            np.array([slot for slot, _, _ in rows], np.int32), np.array(kv_len, np.int32),
            tuple(chunks), nothing > 0, nothing, nothing, pages, nothing > 0,
        )  # fmt: skip
        chains = [np.arange(-1, depth - 1, dtype=np.int32) for _, _, depth in rows]
        drafts = [Draft(0 * chain, chain, chain.astype(np.float32)) for chain in chains]
        self.windows.begin(plan, batch(plan.known, drafts))
        for (slot, _, _), length in zip(rows, kv_len, strict=True):
            text, table = self.running[slot]
            for position in range(max(length - self.window, 0), length):
                content, at = self.place(table, position)
                assert content[at] == text[: position + 1]
        for slot, known, depth in rows:
            text, table = self.running[slot]
            accepted = self.pick.randint(0, depth) if depth else 0
            samples = table.length + known == len(text)
            for _ in range(accepted + samples):
                text.append(self.token(text))
            for position in range(table.length, table.length + known + accepted):
                content, at = self.place(table, position)
                content[at] = text[: position + 1]
        for slot, known, depth in rows:
            text, table = self.running[slot]
            done = min(known + depth, len(text) - table.length - 1)
            table.commit(max(done, known), np.array(text, np.int32))
            if self.pick.random() < 0.5:
                table.rollback()
            if len(text) >= CONTEXT - 8:
                self.end(slot)
        self.steps += 1


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_steps_read_what_was_written(seed, size):
    pool = Pool(seed, size, window=(10, 3, 24)[seed], windows=2 + seed % 2)
    for _ in range(400):
        action = pool.pick.random()
        if action < 0.2:
            pool.admit()
        elif action < 0.24 and pool.running:
            pool.end(pool.pick.choice(sorted(pool.running)))
        else:
            pool.step()
        pool.check()
    assert pool.steps > 100 and pool.hits > 3
    for slot in sorted(pool.running):
        pool.end(slot)
    pool.windows.check()
    assert pool.index.held == 0


def test_what_waits_for_its_next_step_holds_its_window_alone():
    pool = Pool(0, 4, window=10, windows=SLOTS, nodes=100)
    pool.pick.random = lambda: 1.0
    for slot in range(SLOTS):
        table = PageTable(pool.index)
        assert table.reserve(60)
        pool.running[slot] = [slot] * 110, table
    for slot in range(SLOTS):
        pool.run([(slot, 60, 0)])
        pool.check()
    held = [len(pages) for pages in pool.windows._held.values()]
    assert held[:-1] == [3] * (SLOTS - 1)


def test_a_text_that_may_have_ended_has_a_place_for_its_last_token():
    """A round that begins from another runs that too; here it is the first in its page."""
    pool = Pool(0, 4, window=10, windows=2)
    pages = np.arange(8, dtype=np.int32)
    pool.windows.open(SlotInit(0, TokenText([0] * 14), 14, Sampling()))
    nothing, some = np.zeros(1, np.int32), np.ones(1, np.int32)
    plan = Plan(
        nothing, nothing, (np.zeros(14, np.int32),), some > 0, nothing, nothing, pages[None],
        nothing > 0,
    )  # fmt: skip
    pool.windows.begin(plan, batch(plan.known, [Draft()]))
    after = replace(plan, kv_len=14 * some, max_depth=3 * some)
    assert pool.windows.begin_after(after, 16 * some)
    assert (pool.windows.of[:6] >= 0).tolist() == [*[True] * 5, False]


def test_more_than_was_planned_for_is_an_error():
    pool = Pool(0, 4, window=40, windows=1)
    pool.pick.random = lambda: 1.0  # No page is given back to the index.
    for slot in range(SLOTS):
        table = PageTable(pool.index)
        table.reserve(60)
        pool.running[slot] = [slot] * 60, table
    with pytest.raises(EngineError, match="more sequences run than were planned for"):
        for _ in range(8):
            pool.run([(slot, 6, 0) for slot in pool.running])
