"""Continues a text within a page that another text left, where the two part within it. The page is
copied: only full pages are shared.

Only a page of the same tenant is: how many tokens were found shows whether they were sent before,
and of a page each token could be guessed by itself.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.cache.table import PageTable
from forerun.types import Ints

MOST = 1024
"""Most pages behind one that are compared, the newest: .3 ms where all begin with the same token,
and 3.3 for 10,000 (one core of an EPYC). A token of the default model takes 5 or more.
"""


def continue_within(
    index: PrefixIndex, table: PageTable, tokens: Ints, copy: Callable[[int, int], bool]
) -> None:
    """Make positions behind a table's shared pages permanent that `index` knows the content of.

    After `table.start` and `table.reserve`, before anything else takes or releases pages.

    tokens  int32[T] as of `start`
    copy    (page, page of the table) -> whether it made the second hold what the first does; if
            not, nothing changes
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
    """Return of the MOST newest pages behind `parent` the one that begins with most of `tokens`
    int32[T], and how many of its positions have what these decide: min(T - lookahead, page_size)
    at most; -1 and 0 if no page has any.

    salt    of the text, if `parent` is the root
    tenant  of the text, and of the page
    """
    lookahead = index.lookahead
    wanted = np.ascontiguousarray(tokens[: index.page_size + lookahead], np.int32)
    if len(wanted) <= lookahead:
        return -1, 0
    begin, size = salt + wanted[: 1 + lookahead].tobytes(), 4 * (index.page_size + lookahead)
    alike = {
        key[len(salt) :]: child.page
        for key, child in islice(reversed(parent.children.items()), MOST)
        if child.tenant == tenant and len(key) == len(salt) + size and key.startswith(begin)
    }
    if not alike:
        return -1, 0
    keys = np.frombuffer(b"".join(alike), np.int32).reshape(len(alike), -1)
    counts = np.logical_and.accumulate(keys[:, : len(wanted)] == wanted, 1).sum(1)
    best = int(counts.argmax())
    return [*alike.values()][best], int(counts[best]) - lookahead
