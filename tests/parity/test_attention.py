"""Attention over chains, trees and blocks of pages: eager, by the kernels' reference, and by the
Triton kernels (interpreted on the CPU), each against the reference of tests/references/verify.py.
"""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineError
from forerun.executors.torch.attention.attention import BLOCK, KeyBlocks, attend, chains
from forerun.executors.torch.attention.attention_shapes import program_heads, tile_heads
from forerun.executors.torch.attention.geometry import geometry_of, places_of
from forerun.executors.torch.attention.kv import KvShape, PagedCache, write
from forerun.executors.torch.decoder.float8 import FLOAT8
from forerun.executors.torch.sizes import KEYS, MOST_PARTS, programs_for, split_of
from forerun.networks.cache_layer import CacheLayer
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import batch
from forerun.speculative.verify import positions
from tests.covering import every, rarely, thinned, values
from tests.parity.driver import limits
from tests.parity.interpreted import load
from tests.references import verify
from tests.references.kernels import attend_dense
from tests.speculative.worlds import as_draft, drafts, paths, plan_of

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
        result = np.empty((*self.queries.shape[:2], self.values.shape[2]), np.float32)
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
                result[node] = softmax_attention(self.queries[node], keys, values, spec, sinks)
        return result

    def expected(self):
        result = []
        for row in range(self.plan.rows):
            part = slice(self.trees.start[row], self.trees.start[row + 1])
            mask = verify.ancestor_mask(self.trees, row)
            tree = self.keys[part], self.values[part]
            result.append(verify.attend(self.queries[part], self.prefixes[row], tree, mask))
        return np.concatenate(result)


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


attention = load("triton.triton_attention")
CPU = torch.device("cpu")


def geometry(pages, parts=None):
    """parts: of every tile's prefix; None: by their lengths."""
    group = tile_heads(pages.queries.shape[1] // pages.groups, pages.queries.shape[2])
    made = geometry_of(pages.plan, pages.trees, pages.places, pages.cache, group, CPU)
    if parts is None:
        return made
    return replace(made, split=attention.uniform(len(made.tiles), parts, CPU))


def both(pages, parts=None, spec=None):
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    made = geometry(pages, parts)
    return attention.attend(*inputs, made, spec).numpy(), attend_dense(*inputs, made, spec).numpy()


SPECS = st.builds(
    AttentionSpec,
    scale=st.sampled_from([0.25, 0.6]),
    window=st.sampled_from([None, 1, 2, 7, 16, 127, 128, 129, 200]),
    softcap=st.sampled_from([None, 0.5, 3.0]),
)
PROGRAMS = {
    "eager": lambda pages, parts, spec: pages.ours(spec),
    "reference": lambda pages, parts, spec: both(pages, parts, spec)[1],
    "triton": lambda pages, parts, spec: both(pages, parts, spec)[0],
}
"""(pages, parts of every tile's prefix, spec) -> context."""
LENGTHS = [0, 1, 5, 63, 64, 65, 127, 128, 130, 300]
ROWS = st.lists(
    st.tuples(st.sampled_from(LENGTHS), st.integers(1, 20), drafts(12)), min_size=1, max_size=3
)
"""Cached tokens, known ones and the draft of each row: across page borders and block borders."""
SHAPES = {
    "rows": ROWS,
    "heads": st.sampled_from([(4, 4), (6, 2), (3, 1), (7, 1)]),
    "page_size": st.sampled_from([1, 16, 256]),
    "parts": st.sampled_from([1, 2, 8]),
    "spec": st.one_of(st.none(), SPECS),
    "seed": st.integers(0, 99),
}


def equals_the_reference(programs, rows, heads, page_size, parts, spec, seed):
    """In the prefix and along the paths of trees, with windows and caps."""
    trees = batch([np.zeros(n, np.int32) for _, n, _ in rows], [draft for _, _, draft in rows])
    pages = Pages([kv_len for kv_len, _, _ in rows], trees, *heads, page_size, seed)
    expected = pages.expected() if spec is None else pages.expected_by(spec)
    for program in programs:
        actual = PROGRAMS[program](pages, parts, spec)
        np.testing.assert_allclose(actual, expected, atol=5e-6 if spec else 3e-6)


@settings(max_examples=50)
@given(**SHAPES)
def test_eager_attention_equals_the_reference(**shape):
    equals_the_reference(["eager"], **shape)


@settings(max_examples=3)
@given(**SHAPES | {"spec": st.none()})
def test_kernels_equal_the_reference(**shape):
    equals_the_reference(["reference", "triton"], **shape)


@pytest.mark.slow
@settings(max_examples=8)
@given(**SHAPES | {"spec": SPECS})
def test_kernels_with_windows_and_caps_equal_the_reference(**shape):
    equals_the_reference(["reference", "triton"], **shape)


@pytest.mark.parametrize(
    ("program", "length", "parts"),
    [
        ("eager", 3 * BLOCK - 50, 1),
        *(pytest.param("triton", 200, parts, marks=pytest.mark.slow) for parts in (1, 4)),
    ],
)
def test_a_long_chunk_over_several_blocks_or_tiles(program, length, parts):
    trees = batch([np.zeros(length, np.int32)], [as_draft([1, 2, 3], [-1, 0, -1])])
    pages = Pages([70], trees, 4, 2, 16, 0)
    np.testing.assert_allclose(PROGRAMS[program](pages, parts, None), pages.expected(), atol=3e-6)


POISONED = every(PROGRAMS, ["keys", "values"], [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize(
    ("program", "field", "poison"),
    rarely(
        POISONED,
        [cell for cell in POISONED if cell[0] == "eager"]
        + [("reference", "keys", np.nan), ("triton", "keys", np.inf), ("triton", "values", np.nan)],
        None,
    ),
)
def test_a_poisoned_guess_spoils_its_descendants_alone(program, field, poison):
    trees = batch(
        [np.zeros(3, np.int32), np.zeros(1, np.int32)],
        [as_draft([1, 2, 3, 4], [-1, -1, 0, 2]), as_draft([], [])],
    )
    for parts in (1, 4) if program == "triton" else (1,):
        pages = Pages([5, 9], trees, 4, 2, 16, 0)
        healthy = PROGRAMS[program](pages, parts, None)
        # The first draft token's first child: node 3 is its parent.
        getattr(pages, field)[5, 0, 3] = poison
        pages.write()
        output = PROGRAMS[program](pages, parts, None)
        spoilt, others = [5, 6], [0, 1, 2, 3, 4, 7]
        np.testing.assert_array_equal(output[others], healthy[others])
        # Heads 0 and 1 read key/value head 0.
        assert np.isnan(output[spoilt][:, :2]).all()
        np.testing.assert_array_equal(output[spoilt][:, 2:], healthy[spoilt][:, 2:])


# --- eager ---------------------------------------------------------------------------------------


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


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_prefixes_over_several_pages_of_every_size(page_size):
    trees = batch([np.zeros(1, np.int32)], [as_draft([1], [-1])])
    pages = Pages([300], trees, 2, 1, page_size, 0)
    np.testing.assert_allclose(both(pages, 2)[0], pages.expected(), atol=3e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_windows_and_caps_on_float8_pages(parts):
    trees = batch([np.zeros(3, np.int32)] * 2, [as_draft([1, 2, 3, 4], [-1, -1, 0, 2])] * 2)
    pages = Pages([150, 5], trees, 6, 2, 16, 0, FLOAT8)
    for spec in (
        AttentionSpec(0.25, 40),
        AttentionSpec(0.4, 3, 1.5),
        AttentionSpec(0.4, None, 1.5),
    ):
        fast, slow = both(pages, parts, spec)
        np.testing.assert_allclose(fast, slow, atol=3e-6)
        np.testing.assert_allclose(pages.ours(spec), slow, atol=3e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_pages_behind_every_window_may_be_any_others(parts):
    """As where they were given back: the bits are the same."""
    trees = batch([np.zeros(3, np.int32)], [as_draft([1, 2, 3, 4], [-1, -1, 0, 2])])
    pages = Pages([150], trees, 6, 2, 16, 0)
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    there, spec = geometry(pages, parts), AttentionSpec(0.25, 40)
    table = there.table.clone()
    table[0, : (150 - 40) // 16] = table[0, 8]
    actual = attention.attend(*inputs, replace(there, table=table), spec)
    assert torch.equal(actual, attention.attend(*inputs, there, spec))
    table[0, (150 - 40) // 16 + 1] = table[0, 8]
    assert not torch.equal(actual, attention.attend(*inputs, replace(there, table=table), spec))


def test_a_window_without_positions_is_refused():
    pages = Pages([5], batch([np.zeros(3, np.int32)], [as_draft([], [])]), 4, 2, 16, 0)
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    nowhere = replace(geometry(pages), position=None)
    for work in (attention.attend, attend_dense):
        with pytest.raises(EngineError, match="positions"):
            work(*inputs, nowhere, AttentionSpec(0.25, 3))
        work(*inputs, nowhere, AttentionSpec(0.25))


@pytest.mark.parametrize("parts", [1, 4])
def test_a_block_sees_all_of_itself_over_its_tiles(parts):
    trees = batch([np.zeros(12, np.int32)] * 2, [as_draft([], [])] * 2)
    pages = Pages([70, 5], trees, 7, 1, 16, 0)
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    there = geometry(pages, parts)
    assert there.tile < 12
    both_ways = torch.tensor([[0], [1]], dtype=torch.int32).expand(2, 24).contiguous()
    whole = replace(there, tree_intervals=both_ways, both_ways=True)
    actual = attention.attend(*inputs, whole)
    np.testing.assert_allclose(actual, attend_dense(*inputs, whole), atol=3e-6)
    assert not np.allclose(actual, attend_dense(*inputs, there))


@pytest.mark.parametrize(
    "spec", [pytest.param(None, marks=pytest.mark.slow), AttentionSpec(0.25, 4)]
)
def test_nothing_before_the_first_entry_is_seen_but_oneself(spec):
    trees = batch([np.zeros(2, np.int32)] * 3, [as_draft([1, 2, 3], [-1, -1, 0])] * 3)
    pages = Pages([70, 1, 0], trees, 4, 2, 16, 0)
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    later = replace(geometry(pages), begin=2)
    actual = attention.attend(*inputs, later, spec)
    np.testing.assert_allclose(actual, attend_dense(*inputs, later, spec), atol=3e-6)
    values = torch.from_numpy(pages.values)
    # Of the last row, whose nodes stand at 0, 1 and behind, the first two see only themselves.
    own = values[-5:-3].repeat_interleave(2, 1)
    np.testing.assert_allclose(actual[-5:-3], own, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype):
    trees = batch([np.zeros(3, np.int32)] * 2, [as_draft([1, 2, 3, 4], [-1, -1, 0, 2])] * 2)
    pages = Pages([70, 5], trees, 6, 2, 16, 0)
    keys, values = (staging.to(dtype) for staging in pages.cache.layers[0])
    queries = torch.from_numpy(pages.queries).to(dtype)
    for parts in (1, 4):
        actual = attention.attend(queries, keys, values, geometry(pages, parts))
        assert actual.dtype == dtype
        error = actual.float().numpy() - pages.expected()
        assert 0 < np.linalg.norm(error) < 8e-3 * np.linalg.norm(pages.expected())


@pytest.mark.parametrize(
    ("dtype", "parts"), thinned(every([torch.float32, torch.bfloat16], [1, 4]), values)
)
def test_float8_pages(dtype, parts):
    """Kernel and reference see the same narrow numbers, which are nearly the wide ones."""
    trees = batch([np.zeros(3, np.int32)] * 2, [as_draft([1, 2, 3, 4], [-1, -1, 0, 2])] * 2)
    pages = Pages([70, 5], trees, 6, 2, 16, 0, FLOAT8)
    keys, values = pages.cache.layers[0]
    assert keys.numbers.dtype == FLOAT8
    queries = torch.from_numpy(pages.queries).to(dtype)
    actual = attention.attend(queries, keys, values, geometry(pages, parts)).float().numpy()
    expected = attend_dense(queries, keys, values, geometry(pages)).float().numpy()
    within = 3e-6 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(actual, expected, atol=within)
    np.testing.assert_allclose(
        pages.ours(), attend_dense(queries.float(), keys, values, geometry(pages)), atol=within
    )
    error = actual - pages.expected()
    assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(pages.expected()) < 0.06


@settings(max_examples=150)
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=100), st.sampled_from([1, 2, 8, 32]))
def test_prefixes_are_cut_by_length(lengths, groups):
    """Every part is some program's, and none is much longer than its share."""
    tiles = len(lengths)
    programs = programs_for(tiles, groups)
    split = split_of(np.array(lengths), programs)
    assert split.shape == (programs, 3) and split.dtype == np.int32
    longest = 0
    for tile, length in enumerate(lengths):
        mine = split[split[:, 0] == tile]
        assert mine[:, 1].tolist() == list(range(len(mine))) and 1 <= len(mine) <= MOST_PARTS
        assert set(mine[:, 2]) == {len(mine)}
        longest = max(longest, ceil(ceil(length / KEYS) / len(mine)) * KEYS)
    share = sum(lengths) / max(programs - tiles, 1)
    assert longest <= max(share, max(lengths) / MOST_PARTS) + 2 * KEYS


def test_a_long_row_among_short_ones_is_many_programs():
    """One of 32k among 63 of 1k: 512 turns of one program by rows alone, 47 by length."""
    lengths = np.array([32_768] + [1024] * 63)
    split = split_of(lengths, programs_for(64, 8))
    assert (split[:, 0] == 0).sum() == 11 and (split[:, 0] > 0).sum() == 63
    assert (split[split[:, 0] > 0, 2] == 1).all()


@pytest.mark.parametrize("numbers", [torch.float32, FLOAT8])
def test_rows_of_any_lengths_in_one_launch(numbers):
    """Some in one part, some in several, some rows with nothing behind them."""
    trees = batch(
        [np.zeros(1, np.int32)] * 4,
        [as_draft([1, 2, 3], [-1, 0, 0]), *[as_draft([], [])] * 2, as_draft([5], [-1])],
    )
    kv_len = [200, 0, 70, 7]
    pages = Pages(kv_len, trees, 6, 2, 16, 0, *([numbers] if numbers == FLOAT8 else []))
    whole = geometry(pages)
    lengths = np.array(kv_len)[whole.tiles[:, 0].numpy()]
    inputs = torch.from_numpy(pages.queries), *pages.cache.layers[0]
    expected = attend_dense(*inputs, whole).numpy()
    tiles = len(lengths)
    for programs in (tiles + 1, tiles + 9):
        split = split_of(lengths, programs)
        assert programs == tiles + 1 or (split[:, 2] > 1).any()
        actual = attention.attend(*inputs, replace(whole, split=torch.from_numpy(split)))
        np.testing.assert_allclose(actual.numpy(), expected, atol=3e-6)


def test_parts_fill_the_device_and_are_few():
    assert [attention.parts_for(n) for n in (1, 8, 64, 132, 264, 5000)] == [32, 32, 8, 2, 1, 1]


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_part_and_carry_nothing(parts, window):
    """As if each head saw one key more, whose score is the sink and whose value is zero."""
    draft = as_draft([5, 6, 7], [-1, 0, -1])
    trees = batch([np.zeros(3, np.int32), np.zeros(1, np.int32)], [draft, draft])
    pages = Pages([130, 7], trees, 6, 2, 16, 3)
    spec, sinks = AttentionSpec(0.3, window, sinks=True), torch.randn(6) * 2
    held, queries = pages.cache.layers[0], torch.from_numpy(pages.queries)
    inputs = queries, *held, geometry(pages, parts), spec
    slow = attend_dense(*inputs, sinks=sinks)
    expected = pages.expected_by(spec, sinks.numpy())
    np.testing.assert_allclose(slow, expected, atol=3e-6)
    np.testing.assert_allclose(attention.attend(*inputs, sinks=sinks), expected, atol=3e-6)
    np.testing.assert_allclose(pages.ours(spec, sinks), expected, atol=3e-6)


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "parts"),
    [(4, 24, 8, 1), (16, 64, 16, 1), (16, 64, 16, 8), (48, 260, 12, 1)],
)
def test_values_that_are_the_keys_first_numbers(heads, rank, rope, parts):
    """Latent attention: one head is kept for all, and many heads are cut into several programs."""
    draft = as_draft([5, 6, 7], [-1, 0, -1])
    trees = batch([np.zeros(3, np.int32), np.zeros(1, np.int32)], [draft, draft])
    pages = Pages([130, 7], trees, heads, 1, 16, 3, kept=CacheLayer(1, rank + rope, rank))
    spec, held = AttentionSpec((rank + rope) ** -0.5), pages.cache.layers[0]
    queries = torch.from_numpy(pages.queries)
    assert program_heads(heads, rank + rope) == min(heads, 16)
    made = geometry(pages, parts)
    expected = pages.expected_by(spec)
    assert expected.shape == (len(trees.tokens), heads, rank)
    for actual in (
        attend_dense(queries, *held, made, spec),
        attention.attend(queries, *held, made, spec),
        pages.ours(spec),
    ):
        np.testing.assert_allclose(actual, expected, atol=5e-6)


def test_what_is_not_finite_in_a_latent_stays_with_its_descendants():
    draft = as_draft([5, 6], [-1, -1])
    trees = batch([np.zeros(1, np.int32)], [draft])
    pages = Pages([40], trees, 4, 1, 16, 3, kept=CacheLayer(1, 24, 16))
    pages.keys[2, 0, 3] = np.nan
    pages.values = pages.keys[..., :16]
    pages.write()
    made, held = geometry(pages), pages.cache.layers[0]
    spec, queries = AttentionSpec(0.3), torch.from_numpy(pages.queries)
    for output in (attend_dense(queries, *held, made, spec), torch.from_numpy(pages.ours(spec))):
        assert output[:2].isfinite().all() and not output[2].isfinite().any()
    assert attention.attend(queries, *held, made, spec)[:2].isfinite().all()
