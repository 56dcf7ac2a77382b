"""Tree attention is ordinary causal attention along every path of the tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.speculative.tree import batch
from forerun.speculative.verify import intervals, positions
from tests.speculative.worlds import as_draft, drafts, paths
from tests.twins.verify import ancestor_mask, attend


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
    found = intervals(trees.parents)
    enter, leave = found
    assert found.dtype == np.int32 and sorted(enter) == list(range(len(trees.tokens)))
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
