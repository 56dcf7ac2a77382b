"""Pages, prefix index and tables under arbitrary use, against a model that only knows texts."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)  # fmt: skip

from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.engine.admission import continue_within


class Text:
    """A table and what it should contain."""

    def __init__(self, table, tokens):
        self.table = table
        self.tokens = tokens


class PagesMachine(RuleBasedStateMachine):
    """Several tables share one pool. Every page's content is tracked as an executor would."""

    texts = Bundle("texts")

    @initialize(pages=st.integers(1, 12), size=st.integers(1, 4))
    def build(self, pages, size):
        self.index = PrefixIndex(pages, size)
        self.size = size
        self.live: list[Text] = []
        self.memory = np.full((pages, size), -1)

    @rule(target=texts, data=st.data())
    def start(self, data):
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=10))
        table = PageTable(self.index, data.draw(st.sampled_from([b"", b"a"])))
        cached = table.start(np.array(tokens, np.int32))
        assert cached % self.size == 0 and cached <= len(tokens)
        return self.within(table, tokens)

    def within(self, table, tokens):
        """The text of a table that has just started: behind whole pages, or within one too."""
        tokens = [*tokens]
        if table.reserve(len(tokens) - table.length):
            continue_within(self.index, table, np.array(tokens, np.int32), self.copy)
        text = Text(table, tokens[: table.length])
        self.live.append(text)
        return text

    def copy(self, source, target):
        assert self.index.references(target) == 1, "a shared page is written to"
        self.memory[target] = self.memory[source]
        return True

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), max_size=8), slack=st.integers(0, 6))
    def advance(self, text, tokens, slack):
        """Reserve, write, commit: as a step does, with or without draft tokens that were
        rejected."""
        if text not in self.live:
            return
        before = self.index.available
        if not text.table.reserve(len(tokens) + slack):
            assert self.index.available == before
            return
        table, start = text.table, text.table.length
        for position, token in enumerate(tokens, start):
            page = table.pages[position // self.size]
            assert self.index.references(page) == 1, "a shared page is written to"
            self.memory[page, position % self.size] = token
        text.tokens = text.tokens + tokens
        table.commit(len(tokens), np.array(text.tokens, np.int32))

    @rule(text=texts)
    def rollback(self, text):
        text.table.rollback()

    @rule(text=consumes(texts))
    def release(self, text):
        text.table.release()
        self.live = [other for other in self.live if other is not text]

    @rule(target=texts, text=texts)
    def fork(self, text):
        """Another sequence begins with the same text: its full pages are shared, and a page that
        begins like the rest is copied."""
        tokens = text.tokens if text in self.live else []
        table = PageTable(self.index, text.table.salt)
        cached = table.start(np.array(tokens, np.int32))
        assert cached == len(tokens) // self.size * self.size
        return self.within(table, tokens)

    @rule()
    @precondition(lambda self: self.index.evictable)
    def forget(self):
        for page in self.index.take(self.index.available):
            self.index.release(page)
        assert self.index.evictable == 0

    @invariant()
    def nothing_leaked(self):
        if not hasattr(self, "index"):
            return
        self.index.check()
        held = {}
        for text in self.live:
            text.table.check()
            for page in text.table.pages:
                held[page] = held.get(page, 0) + 1
        index = self.index
        assert all(index.references(page) == held.get(page, 0) for page in range(index.pages))

    @invariant()
    def every_table_reads_its_own_text(self):
        for text in getattr(self, "live", ()):
            pages = np.array(text.table.pages, np.int64)
            content = self.memory[pages].ravel()[: text.table.length]
            assert content.tolist() == text.tokens

    @invariant()
    def salts_share_no_page(self):
        salts = {}
        for text in getattr(self, "live", ()):
            for page in text.table.pages:
                assert salts.setdefault(page, text.table.salt) == text.table.salt

    def teardown(self):
        for text in getattr(self, "live", ()):
            text.table.release()
        if hasattr(self, "index"):
            self.index.check()
            assert self.index.held == 0


PagesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, derandomize=True)
TestPages = PagesMachine.TestCase
