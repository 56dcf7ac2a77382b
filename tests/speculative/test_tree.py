"""`batch` hangs drafts below known chains and keeps every parent where it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.speculative.tree import Draft, batch
from tests.speculative.worlds import as_draft, drafts, paths

rows = st.lists(
    st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=6), drafts()), max_size=5
)


@settings(max_examples=300, deadline=None)
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


def test_what_cannot_be_a_tree_is_refused():
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="row 1 has no known token"):
        batch([one, one[:0]], [Draft(), Draft()])
    for parents in ([0], [-1, 1], [1, -1], [-2]):
        with pytest.raises(ValueError, match="row 0: a parent is neither"):
            batch([one], [as_draft([3] * len(parents), parents)])
    with pytest.raises(ValueError, match="shorter"):
        batch([one, one], [Draft()])
