"""Attention over chains and blocks is the reference attention of tests/twins/verify.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.torch.attention.attention import BLOCK, KeyBlocks, attend, chains
from forerun.executors.torch.attention.geometry import places_of
from forerun.executors.torch.attention.kv import KvShape, PagedCache, write
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import batch
from forerun.speculative.verify import positions
from tests.parity.driver import limits
from tests.speculative.worlds import as_draft, drafts, paths, plan_of
from tests.twins import verify

SIZE = 16


class Pages:
    """A cache of one layer with random prefixes in shuffled pages."""

    def __init__(
        self, kv_len, trees, heads, groups, page_size, seed, dtype=torch.float32, kept=None
    ):
        self.random = np.random.default_rng(seed)
        self.kept = kept or CacheLayer(groups, SIZE)
        width = 600 // page_size + 1
        self.cache = PagedCache(
            KvShape((self.kept,)),
            limits(8, page_size=page_size, pages=len(kv_len) * width),
            torch.device("cpu"),
            dtype,
        )
        self.plan = plan_of(list(range(len(kv_len))), kv_len, [[0]] * len(kv_len), [True])
        table = self.random.permutation(len(kv_len) * width).reshape(len(kv_len), width)
        object.__setattr__(self.plan, "page_table", table.astype(np.int32))
        self.trees, self.groups = trees, groups
        self.queries = self.normal(len(trees.tokens), heads)
        self.keys, self.values = self.pair(len(trees.tokens))
        self.prefixes = [self.prefix(row, length) for row, length in enumerate(kv_len)]
        self.places = places_of(self.plan, trees, self.cache)
        self.write()

    def write(self):
        """The step's own keys and values, where they belong."""
        there = torch.from_numpy(self.places)
        write(
            self.cache.layers[0], there, torch.from_numpy(self.keys), torch.from_numpy(self.values)
        )

    def normal(self, count, heads):
        size = count, heads, self.kept.head_size
        return self.random.normal(size=size).astype(np.float32)

    def pair(self, count):
        """Keys and values."""
        keys, values = (self.normal(count, self.groups) for _ in "kv")
        return keys, values if self.kept.value_size is None else keys[..., : self.kept.value_size]

    def prefix(self, row, length):
        """Random keys and values [kv_len,G,E], put into the row's pages."""
        pair = self.pair(length)
        positions = np.arange(length)
        for part in np.array_split(positions, -(-length // 256) or 1):
            slots = torch.from_numpy(self.cache.slots_of(self.plan.page_table, row, part))
            write(self.cache.layers[0], slots, *(torch.from_numpy(array[part]) for array in pair))
        return pair

    def ours(self, spec=None, sinks=None):
        held, queries = self.cache.layers[0], torch.from_numpy(self.queries)
        return attend(queries, *held, self.seen(), spec, sinks=sinks).numpy()

    def seen(self):
        return KeyBlocks.of(self.plan, self.trees, self.places, self.cache)

    def expected_by(self, spec, sinks=None):
        """Every node on its own: the keys along its path, by position, and a plain softmax."""
        place = positions(self.trees, self.plan.kv_len)
        found = np.empty((*self.queries.shape[:2], self.values.shape[2]), np.float32)
        for row, prefix in enumerate(self.prefixes):
            for node in self.trees.nodes(row):
                path = [node]
                while self.trees.parents[path[0]] >= 0:
                    path.insert(0, int(self.trees.parents[path[0]]))
                keys, values = (
                    np.concatenate([cached, own[path]])[-spec.window if spec.window else None :]
                    for cached, own in zip(prefix, (self.keys, self.values), strict=True)
                )
                assert len(keys) == min(place[node] + 1, spec.window or 1 << 30)
                found[node] = softmax_attention(self.queries[node], keys, values, spec, sinks)
        return found

    def expected(self):
        found = []
        for row in range(self.plan.rows):
            part = slice(self.trees.start[row], self.trees.start[row + 1])
            mask = verify.ancestor_mask(self.trees, row)
            tree = self.keys[part], self.values[part]
            found.append(verify.attend(self.queries[part], self.prefixes[row], tree, mask))
        return np.concatenate(found)


def softmax_attention(query, keys, values, spec, sinks=None):
    """[A,E] of one node's query [A,E] over keys and values [T,G,E], in float64."""
    shared = len(query) // keys.shape[1]
    keys, values = (np.repeat(each.astype(np.float64), shared, 1) for each in (keys, values))
    scores = np.einsum("ae,tae->at", query, keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[:, : len(keys)]
    return np.einsum("at,tae->ae", weights, values)


SPECS = st.builds(
    AttentionSpec,
    scale=st.sampled_from([0.25, 0.6]),
    window=st.sampled_from([None, 1, 2, 7, 16, 127, 128, 129, 200]),
    softcap=st.sampled_from([None, 0.5, 3.0]),
)


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 127, 128, 130, 300]), st.integers(1, 20), drafts(12)),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    page_size=st.sampled_from([1, 16, 256]),
    spec=SPECS,
    seed=st.integers(0, 99),
)
def test_windows_and_caps_equal_the_reference(rows, heads, page_size, spec, seed):
    """Across page borders and block borders, in the prefix and along the paths of trees."""
    known = [np.zeros(count, np.int32) for _, count, _ in rows]
    trees = batch(known, [draft for _, _, draft in rows])
    pages = Pages([kv_len for kv_len, _, _ in rows], trees, *heads, page_size, seed)
    np.testing.assert_allclose(pages.ours(spec), pages.expected_by(spec), atol=5e-6)


def test_blocks_that_no_window_reaches_are_not_read():
    trees = batch([np.zeros(1, np.int32)], [as_draft([1, 2, 3], [-1, 0, -1])])
    pages = Pages([4 * BLOCK], trees, 4, 2, 16, 0)
    seen = pages.seen()
    made = [seen.within(window) for window in (None, 2 * BLOCK, 10)]
    assert [len(blocks) for blocks in made] == [5, 3, 2]


def test_a_window_along_a_tree_is_counted_by_position():
    """A long branch beside a short one: each node forgets along its own path."""
    draft = as_draft([1, 2, 3, 4, 5], [-1, 0, 1, -1, 3])
    trees = batch([np.zeros(1, np.int32)], [draft])
    pages = Pages([4], trees, 4, 2, 16, 0)
    spec = AttentionSpec(0.25, window=2)
    before = pages.ours(spec)
    pages.keys[1] += 5.0  # The first draft token: seen by itself and its child only.
    pages.write()
    changed = (pages.ours(spec) != before).any((1, 2))
    assert changed.tolist() == [False, True, True, False, False, False]


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 127, 128, 130, 300]), st.integers(1, 20), drafts(12)),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    page_size=st.sampled_from([1, 16, 256]),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_reference(rows, heads, page_size, seed):
    known = [np.zeros(count, np.int32) for _, count, _ in rows]
    trees = batch(known, [draft for _, _, draft in rows])
    pages = Pages([kv_len for kv_len, _, _ in rows], trees, *heads, page_size, seed)
    np.testing.assert_allclose(pages.ours(), pages.expected(), atol=3e-6)


def test_a_long_chunk_over_several_blocks():
    trees = batch([np.zeros(3 * BLOCK - 50, np.int32)], [as_draft([1, 2, 3], [-1, 0, -1])])
    pages = Pages([70], trees, 4, 2, 16, 0)
    np.testing.assert_allclose(pages.ours(), pages.expected(), atol=3e-6)


@settings(max_examples=80)
@given(drafts(12), st.integers(1, 4), drafts(3))
def test_chains_are_paths_and_every_node_reads_once(draft, known, other):
    trees = batch([np.zeros(2, np.int32), np.zeros(known, np.int32)], [other, draft])
    path_of = dict(paths(trees, 1))
    read = []
    for chain, readers in chains(trees, 1):
        assert chain.tolist() == path_of[int(chain[-1])].tolist()
        assert set(readers.tolist()) <= set(chain.tolist())
        assert np.all(np.diff(readers) > 0)
        read += readers.tolist()
    assert sorted(read) == list(trees.nodes(1))


@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_guess_spoils_who_sees_it_and_nobody_else(field, poison):
    trees = batch(
        [np.zeros(3, np.int32), np.zeros(1, np.int32)],
        [as_draft([1, 2, 3, 4], [-1, -1, 0, 2]), as_draft([], [])],
    )
    clean = Pages([5, 9], trees, 4, 2, 16, 0)
    healthy = clean.ours()
    getattr(clean, field)[5, 0, 3] = (
        poison  # The first draft token's first child: node 3 is its parent.
    )
    clean.write()
    found = clean.ours()
    spoilt = [5, 6]
    others = [node for node in range(len(found)) if node not in spoilt]
    np.testing.assert_array_equal(found[others], healthy[others])
    # Heads 0 and 1 read key/value head 0.
    assert np.isnan(found[spoilt][:, :2]).all()
    np.testing.assert_array_equal(found[spoilt][:, 2:], healthy[spoilt][:, 2:])
