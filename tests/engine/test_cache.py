"""Pages, the prefix index and page tables: contracts one by one (the fuzz test mixes them)."""

import numpy as np
import pytest

from forerun.cache.prefix import PrefixIndex
from forerun.cache.table import PageTable
from forerun.engine import admission
from forerun.engine.admission import continue_within, partial_match
from tests.engine.toys import ints


def index(pages=8, size=2):
    return PrefixIndex(pages, size)


def free(shared):
    return shared.available - shared.evictable


def filled(shared, tokens, salt=b""):
    """A table that holds `tokens`, reusing what the index knows."""
    table = PageTable(shared, salt)
    start = table.start(tokens)
    assert table.reserve(len(tokens) - start)
    table.commit(len(tokens) - start, tokens)
    table.check()
    shared.check()
    return table


def test_references_are_counted():
    shared = index(pages=3)
    table = filled(shared, ints(1, 2))
    (page,) = table.pages
    other = filled(shared, ints(1, 2))
    assert shared.references(page) == 2 and shared.held == 1 and free(shared) == 2
    table.release()
    assert shared.references(page) == 1 and shared.evictable == 0
    other.release()
    assert shared.references(page) == 0 and shared.evictable == 1
    with pytest.raises(ValueError, match="no table holds it"):
        shared.release(page)
    shared.check()


def test_more_pages_than_there_are():
    shared = index(pages=2)
    assert shared.take(3) is None and free(shared) == 2 and shared.held == 0
    assert shared.take(2) is not None and shared.held == 2
    with pytest.raises(ValueError, match="at least one page"):
        index(pages=0)


@pytest.mark.parametrize("size", [0, 257])
def test_page_size_bounds(size):
    with pytest.raises(ValueError, match="page size"):
        index(size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 256])
def test_only_full_pages_are_found_again(size):
    shared = index(pages=16, size=size)
    tokens = np.arange(3 * size + size // 2, dtype=np.int32)
    filled(shared, tokens).release()
    table = PageTable(shared)
    assert table.start(tokens) == 3 * size
    assert table.pages.tolist() == [entry.page for entry in table._chain]


def test_two_that_compute_the_same_page_end_up_with_one():
    shared = index()
    tables = [PageTable(shared), PageTable(shared)]
    for table in tables:  # Neither finds the other's pages: both are still computing.
        assert table.start(ints(1, 2, 3, 4)) == 0 and table.reserve(4)
    for table in tables:
        table.commit(4, ints(1, 2, 3, 4))
    assert tables[0].pages == tables[1].pages
    assert shared.held == 2 and free(shared) == 6
    shared.check()


def test_pages_differ_by_the_token_after_them_where_that_matters():
    shared = PrefixIndex(8, 2, lookahead=1)
    tables = [PageTable(shared), PageTable(shared), PageTable(shared)]
    texts = [ints(1, 2, 3, 4, 5), ints(1, 2, 3, 4, 6), ints(1, 2, 3, 4, 5)]
    for table in tables:
        assert table.reserve(4)
    for table, text in zip(tables, texts, strict=True):
        table.commit(4, text)
        table.check()
    first, second, third = (table.pages.tolist() for table in tables)
    assert first == third and first[0] == second[0] and first[1] != second[1]
    shared.check()
    probe = PageTable(shared)
    assert probe.start(ints(1, 2, 3, 4)) == 2, "what comes after the second page is unknown"
    probe.release()
    assert probe.start(ints(1, 2, 3, 4, 6)) == 4 and probe.pages.tolist() == second
    probe.release()
    assert probe.start(ints(1, 2, 9, 4, 6)) == 0


def test_a_page_waits_for_the_token_after_it():
    shared = PrefixIndex(8, 2, lookahead=1)
    table = PageTable(shared)
    assert table.reserve(4)
    table.commit(2, ints(1, 2))
    table.check()
    assert PageTable(shared).start(ints(1, 2, 3)) == 0
    for count, known in ((0, (1, 2, 3)), (2, (1, 2, 3, 4))):
        table.commit(count, ints(*known))
        table.check()
        probe = PageTable(shared)
        assert probe.start(ints(1, 2, 3)) == 2
        probe.release()
    table.release()
    shared.check()
    assert shared.evictable == 1 and free(shared) == 7
    for size in (1, 3):
        shared = PrefixIndex(8, size, lookahead=1)
        filled(shared, ints(1, 2, 3, 4)).release()
        assert PageTable(shared).start(ints(1, 2, 3, 4)) == 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_page_that_begins_alike(lookahead):
    """Of several the one that has most; what depends on the token behind it is not the same."""
    shared = PrefixIndex(8, 4, lookahead)
    for last in ((7, 8, 1), (7, 9, 1), (9, 9, 1)):
        filled(shared, ints(1, 2, 3, 4, 5, 6, *last)).release()
    table = PageTable(shared)
    assert table.start(ints(1, 2, 3, 4, 5)) == 4
    (entry,) = table._chain
    pages = [child.page for child in entry.children.values()]

    def found(*tokens):
        return partial_match(shared, entry, ints(*tokens))

    assert found(5, 6, 7, 9) == (pages[1], 4 - lookahead)
    assert found(5, 6, 7, 9, 1) == found(5, 6, 7, 9, 1, 1) == (pages[1], 4)
    assert found(5, 6, 9, 8) == (pages[2], 3 - lookahead)
    assert found(5, 6)[1] == 2 - lookahead and found(5)[1] == 1 - lookahead
    assert found(6)[1] == found()[1] == 0
    assert found(6, 6, 7, 9)[1] == 0
    assert partial_match(shared, shared.root, ints(1, 2, 9))[1] == 2 - lookahead
    shared.check()


def test_a_page_that_begins_alike_is_of_the_same_salt():
    """Also where a salt is what the other text begins with."""
    shared = index(pages=12)
    for salt in (b"", ints(1).tobytes()):
        filled(shared, ints(1, 2, 3, 4), salt).release()

    def found(*tokens, salt=b""):
        return partial_match(shared, shared.root, ints(*tokens), salt)[1]

    assert found(1, 9) == found(1, 9, salt=ints(1).tobytes()) == 1
    assert found(1, 1) == 1 and found(2, 9) == 0
    assert found(1, 9, salt=b"a") == found(2, 9, salt=ints(1).tobytes()) == 0


def test_a_text_continues_only_within_a_page_of_its_tenant():
    """Full pages are shared: to find one its tokens must be guessed all at once."""
    shared = index(size=4)
    for tenant, tokens in ((1, (1, 2, 3, 4)), (2, (1, 2, 3, 4)), (2, (1, 2, 3, 5))):
        table = PageTable(shared, tenant=tenant)
        table.start(ints(*tokens))
        assert table.reserve(4)
        table.commit(4, ints(*tokens))
        table.release()

    def found(tenant):
        table = PageTable(shared, tenant=tenant)
        whole = table.start(ints(1, 2, 3, 4))
        table.release()
        assert table.start(ints(1, 2, 3)) == 0 and table.reserve(4)
        continue_within(shared, table, ints(1, 2, 3, 4)[:3], lambda *_: True)
        reused = table.length
        table.release()
        return whole, reused

    assert [found(tenant) for tenant in (0, 1, 2)] == [(4, 0), (4, 3), (4, 3)]


def test_of_many_pages_the_newest_are_compared(monkeypatch):
    monkeypatch.setattr(admission, "MOST_COMPARED", 2)
    shared = index()
    for first in (3, 5, 7):
        filled(shared, ints(first, 2)).release()
    lengths = [partial_match(shared, shared.root, ints(first, 9))[1] for first in (3, 5, 7)]
    assert lengths == [0, 1, 1]


@pytest.mark.parametrize("can", [True, False])
def test_a_page_that_was_copied_is_evicted_last(can):
    shared = index(pages=4)
    for first in (1, 3, 5):
        filled(shared, ints(first, 2)).release()
    table = PageTable(shared)
    assert table.start(ints(1)) == 0 and table.reserve(2)
    continue_within(shared, table, ints(1), lambda *_: can)
    assert table.length == can and shared.take(2) is not None
    assert [PageTable(shared).start(ints(first, 2)) for first in (1, 5)] == [2 * can, 2 * (not can)]
    shared.check()


@pytest.mark.parametrize("can", [True, False])
def test_a_table_continues_within_a_page(can):
    shared, copies = index(size=4), []
    known = filled(shared, ints(1, 2, 3, 4, 5, 6, 7, 8))
    table, tokens = PageTable(shared), ints(1, 2, 3, 4, 5, 6, 9, 9)

    def copy(*pages):
        copies.append(pages)
        return can

    assert table.start(tokens[:-1]) == 4 and table.reserve(4)
    continue_within(shared, table, tokens[:-1], copy)
    assert copies == [(known.pages[1], table.pages[1])] and table.pages[1] != known.pages[1]
    assert table.length == (6 if can else 4)
    table.check()
    table.commit(8 - table.length, tokens)
    table.check()
    assert table.pages[1] != known.pages[1] and shared.references(known.pages[1]) == 1
    for each in (table, known):
        each.release()
    shared.check()
    assert shared.held == 0 and shared.evictable == 3


def test_a_copy_that_becomes_its_source_is_given_back():
    shared = index(size=4)
    tokens = ints(1, 2, 3, 4)
    known, table = filled(shared, tokens), PageTable(shared)
    assert table.start(tokens[:-1]) == 0 and table.reserve(4)
    continue_within(shared, table, tokens[:-1], lambda *_: True)
    assert table.length == 3 and shared.held == 2
    table.commit(1, tokens)
    assert table.pages == known.pages and shared.held == 1
    shared.check()


def test_kept_pages_are_evicted_least_recently_used_first_and_leaves_before_parents():
    shared = index(pages=4)
    filled(shared, ints(1, 2, 3, 4)).release()
    filled(shared, ints(5, 6, 7, 8)).release()
    filled(shared, ints(1, 2, 3, 4)).release()  # Used again: now the younger.
    assert shared.evictable == 4 and free(shared) == 0
    table = PageTable(shared)
    assert table.reserve(2)  # One page: the leaf of the older text.
    assert PageTable(shared).start(ints(5, 6, 7, 8)) == 2
    shared.check()
    assert table.reserve(4)
    shared.check()
    probe = PageTable(shared)
    assert probe.start(ints(1, 2, 3, 4)) == 2


def test_reserve_commit_rollback():
    shared = index()
    table = PageTable(shared)
    assert table.reserve(5) and table.reserved == 6
    assert table.reserve(3) and table.reserved == 6
    table.commit(2, ints(1, 2))
    table.rollback()
    assert (table.length, table.reserved, free(shared)) == (2, 2, 7)
    with pytest.raises(ValueError, match="only 2 positions are reserved"):
        table.commit(1, ints(1, 2, 3))
    table.release()
    assert (table.length, shared.evictable, free(shared)) == (0, 1, 7)
    table.check()
    shared.check()


def test_taking_every_page_evicts_everything_kept():
    shared = index()
    held, table = filled(shared, ints(1, 2)), filled(shared, ints(1, 2, 3, 4))
    (shorter, entry) = table.chain
    table.release()
    assert shared.contains(shorter) and shared.contains(entry)
    for page in shared.take(shared.available):
        shared.release(page)
    assert shared.evictable == 0 and shared.held == 1
    assert shared.contains(shorter) and not shared.contains(entry)
    assert PageTable(shared).start(ints(1, 2, 3, 4)) == 2
    held.check()
    shared.check()


def test_what_a_table_starts_with_may_be_shortened():
    """By whole pages, and only right after its start."""
    shared, tokens = index(), ints(1, 2, 3, 4, 5, 6, 7, 8)
    filled(shared, tokens).release()
    table = PageTable(shared)
    assert table.start(tokens) == 8
    with pytest.raises(AssertionError):
        table.shorten(3)
    table.shorten(6)
    assert len(table.chain) == 3
    table.check()
    table.shorten(4)
    table.shorten(6)
    assert table.length == table.reserved == 4 and shared.held == 2
    table.check()
    assert table.reserve(1)
    with pytest.raises(AssertionError):
        table.shorten(2)


def test_a_commit_backwards_is_refused():
    table = filled(index(), ints(1, 2))
    with pytest.raises(ValueError, match="commit to 1"):
        table.commit(-1, ints(1))
    assert table.length == 2


def test_rollback_keeps_what_is_there_where_more_may_be_growing():
    shared = index()
    table = filled(shared, ints(1, 2, 3))
    table.rollback(growing=8)
    assert len(table.pages) == 2
    table.check()


def counts(shared, page, references):
    shared._references[page] = references


def unkept(shared):
    """The page that is kept; it no longer is."""
    return shared._idle.popitem()[0]


SPOILT = {
    "free twice": ("twice", lambda pages, held: pages._free.append(pages._free[0])),
    "before the first": ("does not exist", lambda pages, held: pages._free.append(-1)),
    "behind the last": ("does not exist", lambda pages, held: pages._free.append(8)),
    "beyond that": ("does not exist", lambda pages, held: pages._free.append(9)),
    "less than none": ("fewer than no", lambda pages, held: counts(pages, held.pages[2], -1)),
    "unowned": ("are not 8", lambda pages, held: counts(pages, held.pages[2], 0)),
    "free and held": ("free and held", lambda pages, held: counts(pages, pages._free[0], 1)),
    "free and kept": ("are not 8", lambda pages, held: pages._free.append(KEPT)),
    "free and known": ("idle list", lambda pages, held: pages._free.append(unkept(pages))),
    "held and kept": ("idle list", lambda pages, held: counts(pages, KEPT, pages._free.pop())),
    "another's": ("^$", lambda pages, held: setattr(pages._entries[0], "page", 7)),
    "no past": ("entries in the tree", lambda pages, held: pages._entries.pop(held.pages[0])),
    "no entry": ("entries in the tree", lambda pages, held: pages._entries.pop(held.pages[1])),
    "less than shared": (None, lambda pages, held: setattr(held, "length", 3)),
    "more than reserved": (None, lambda pages, held: setattr(held, "length", 7)),
    "other pages": (None, lambda pages, held: held.pages.reverse()),
    "one page more": (None, lambda pages, held: held.pages.append(held.pages[2])),
    "a page twice": (None, lambda pages, held: held.pages.insert(2, held.pages.pop() * 0)),
    "a missed commit": (None, lambda pages, held: setattr(held, "_due", 0)),
    "another entry": (None, lambda pages, held: setattr(held.chain[1], "page", 9)),
    "a leak": (None, lambda pages, held: counts(pages, held.pages[0], 0)),
}
"""What the index's check says, or None where the table's fails, after a change of either."""
KEPT = 3


@pytest.mark.parametrize(("said", "change"), SPOILT.values(), ids=SPOILT)
def test_checks_see(said, change):
    shared = index()
    held, kept = filled(shared, ints(1, 2, 3, 4, 5)), filled(shared, ints(1, 2, 7, 8))
    assert kept.pages[1] == KEPT
    kept.release()
    change(shared, held)
    with pytest.raises(AssertionError, match=said):
        (held if said is None else shared).check()


def test_texts_of_different_salts_share_no_page():
    """Also where a salt is what the other text begins with."""
    shared, tokens = index(pages=12), ints(1, 2, 3, 4)
    tables = {salt: filled(shared, tokens, salt) for salt in (b"", b"a", b"b")}
    pages = [page for table in tables.values() for page in table.pages]
    assert len(set(pages)) == 6
    for table in tables.values():
        table.release()
    for salt in tables:
        again = PageTable(shared, salt)
        assert again.start(tokens) == 4
        again.release()
    assert PageTable(shared, b"c").start(tokens) == 0
    begins = filled(shared, ints(3, 4), ints(1, 2).tobytes())
    assert begins.pages[0] not in pages
    ahead = PrefixIndex(8, 2, lookahead=1)
    filled(ahead, tokens)
    for known, shorter in ((shared, (2, 3, 4)), (shared, (2,)), (ahead, (2, 3))):
        assert PageTable(known, ints(1).tobytes()).start(ints(*shorter)) == 0
    shared.check()
