"""`batch` hangs drafts below known chains and keeps every parent where it was."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.speculative.tree import Draft, DraftSource, batch, unpadded
from forerun.speculative.verify import intervals, positions
from tests.references.verify import ancestor_mask, attend
from tests.speculative.worlds import as_draft, drafts, paths

rows = st.lists(
    st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=6), drafts()), max_size=5
)


@settings(max_examples=120)
@given(rows.filter(len))
def test_every_node_keeps_its_token_parent_and_depth(rows):
    chains = [np.array(chain, np.int32) for chain, _ in rows]
    drafts = [draft for _, draft in rows]
    trees = batch(chains, drafts)
    assert trees.rows == len(rows)
    assert [a.dtype for a in (trees.tokens, trees.parents, trees.start, trees.depth)] == [
        "int32"
    ] * 4
    for row, (chain, draft) in enumerate(zip(chains, drafts, strict=True)):
        nodes = trees.nodes(row)
        first, root = nodes.start, trees.root(row)
        assert len(nodes) == len(chain) + len(draft)
        assert root - first == len(chain) - 1 == trees.known[row] - 1
        assert trees.tokens[nodes].tolist() == chain.tolist() + draft.tokens.tolist()
        assert trees.parents[first : root + 1].tolist() == [-1, *range(first, root)]
        for index, parent in enumerate(draft.parents):
            node = root + 1 + index
            assert trees.parents[node] == (root if parent < 0 else root + 1 + parent)
        for node, path in paths(trees, row):
            assert path[0] == first
            assert trees.depth[node] == len(path) - 1
    assert trees.start[-1] == len(trees.tokens)
    assert trees.roots.tolist() == [trees.root(row) for row in range(trees.rows)]
    assert trees.decode_only == all(len(trees.nodes(row)) == 1 for row in range(trees.rows))
    assert trees.drafts == drafts


@settings(max_examples=120)
@given(st.lists(drafts(), min_size=1, max_size=4), st.integers(0, 2), st.randoms())
def test_padded_trees_are_those_of_their_drafts(drafts, more, random):
    """Whatever stands where no node is."""
    counts = np.array([1 + len(draft) for draft in drafts], np.int32)
    shape = len(drafts), int(counts.max()) + more
    tokens, parents = (
        np.array([[random.randint(-3, 20) for _ in range(shape[1])] for _ in drafts], np.int32)
        for _ in range(2)
    )
    parents[:, 0] = -1
    for row, draft in enumerate(drafts):
        below = slice(1, counts[row])
        tokens[row, below], parents[row, below] = draft.tokens, draft.parents + 1
    trees, place = unpadded(tokens, parents, counts)
    expected = batch(tokens[:, :1], drafts)
    for name in ("tokens", "parents", "start", "known", "depth"):
        assert np.array_equal(getattr(trees, name), getattr(expected, name)), name
    places = [row * shape[1] + node for row, n in enumerate(counts) for node in range(n)]
    assert place.tolist() == places and place.dtype == trees.parents.dtype == np.int32


def test_an_empty_draft_is_empty_in_every_field():
    nothing = Draft()
    fields = (nothing.tokens, nothing.parents, nothing.score)
    assert [array.shape for array in fields] == [(0,)] * 3
    assert [array.dtype for array in fields] == [np.int32, np.int32, np.float32]
    assert len(nothing) == 0 and nothing.sources() == []


def test_every_source_is_found_by_its_number():
    everything = list(DraftSource)
    # An enum takes a number that is used twice for another name of the same.
    assert [source.name for source in everything] == list(DraftSource.__members__)
    count = len(everything)
    each = replace(as_draft([0] * count, [-1] * count), source=np.array(everything, np.int32))
    assert each.sources() == everything
    assert each.source_of(slice(1, 3)).tolist() == everything[1:3]
    alike = replace(as_draft([0, 0], [-1, 0]), source=DraftSource.GRAMMAR)
    assert alike.sources() == [DraftSource.GRAMMAR] * 2
    assert alike.source_of(slice(1)) is DraftSource.GRAMMAR
    assert as_draft([0], [-1]).sources() == [DraftSource.UNKNOWN]


def test_what_all_steps_of_plain_decoding_share_cannot_be_written_to():
    trees = batch(np.ones((2, 1), np.int32), [Draft(), Draft()])
    assert trees.roots.tolist() == [0, 1]
    shared = (trees.parents, trees.start, trees.known, trees.depth)
    one_by_one = batch([np.ones(1, np.int32)] * 2)  # No drafts are empty ones.
    for name in ("tokens", "parents", "start", "known", "depth"):
        assert getattr(trees, name).tolist() == getattr(one_by_one, name).tolist()
    assert not any(array.flags.writeable for array in shared)


def test_what_cannot_be_a_tree_is_refused():
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="row 1 has no known token"):
        batch([one, one[:0]], [Draft(), Draft()])
    for parents in ([0], [-1, 1], [1, -1], [-2]):
        with pytest.raises(ValueError, match="row 0: a parent is neither"):
            batch([one], [as_draft([3] * len(parents), parents)])
    with pytest.raises(ValueError, match="shorter"):
        batch([one, one], [Draft()])


# --- tree attention is ordinary causal attention along every path of the tree --------------------


@settings(max_examples=200)
@given(drafts(12), st.integers(1, 4), drafts(3))
def test_a_node_sees_its_path_and_nothing_else(draft, known, other):
    trees = batch([np.zeros(2, np.int32), np.zeros(known, np.int32)], [other, draft])
    mask, first = ancestor_mask(trees, 1), int(trees.start[1])
    for node, path in paths(trees, 1):
        assert np.flatnonzero(mask[node - first]).tolist() == (path - first).tolist()


@settings(max_examples=200)
@given(drafts(12), st.integers(1, 4))
def test_intervals_are_the_mask_in_two_numbers_per_node(draft, known):
    trees = batch([np.zeros(known, np.int32)], [draft])
    actual = intervals(trees.parents)
    enter, leave = actual
    assert actual.dtype == np.int32 and sorted(enter) == list(range(len(trees.tokens)))
    above = (enter <= enter[:, None]) & (enter[:, None] < leave)
    assert above.tolist() == ancestor_mask(trees, 0).tolist()


def test_positions_count_from_the_cached_tokens():
    trees = batch(
        [np.zeros(3, np.int32), np.zeros(1, np.int32)],
        [as_draft([1, 2, 3], [-1, -1, 0]), as_draft([1], [-1])],
    )
    expected = [10, 11, 12, 13, 13, 14, 7, 8]
    assert positions(trees, np.array([10, 7], np.int32)).tolist() == expected


def slow_attention(query, keys, values):
    """One head, one query: softmax(q k / sqrt(E)) v, number by number."""
    scores = [float(query @ key) / np.sqrt(len(query)) for key in keys.astype(np.float64)]
    weights = [np.exp(score - max(scores)) for score in scores]
    return sum(w * v.astype(np.float64) for w, v in zip(weights, values, strict=True)) / sum(
        weights
    )


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("cached", [0, 5])
def test_attend_is_causal_attention_along_each_path(heads, groups, cached):
    random = np.random.default_rng(heads + cached)
    trees = batch([np.zeros(2, np.int32)], [as_draft([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])])
    count, size = len(trees.tokens), 8
    queries = random.normal(size=(count, heads, size)).astype(np.float32) * 3
    prefix, tree = (
        tuple(random.normal(size=(2, n, groups, size)).astype(np.float32)) for n in (cached, count)
    )
    result = attend(queries, prefix, tree, ancestor_mask(trees, 0))
    assert result.dtype == np.float32
    for node, path in paths(trees, 0):
        for head in range(heads):
            group = head // (heads // groups)
            keys = np.concatenate([prefix[0][:, group], tree[0][path, group]])
            values = np.concatenate([prefix[1][:, group], tree[1][path, group]])
            expected = slow_attention(queries[node, head], keys, values)
            np.testing.assert_allclose(result[node, head], expected, rtol=2e-6, atol=1e-6)
