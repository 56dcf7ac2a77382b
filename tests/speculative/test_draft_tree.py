"""Growing trees, level by level and best first, against brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft_shape import DraftShape
from forerun.speculative.draft_tree import (
    DraftTree,
    best_first,
    block_draft,
    full_draft,
    path_draft,
    pruned,
)
from forerun.speculative.tree import DraftSource, full_size

WORDS = 5


def path_of(growth: DraftTree, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node >= 0:
        path = (int(growth.tokens[node]), *path)
        node = int(growth.parents[node])
    return path


def grow(expand, width, depth, nodes):
    """A draft of at most `nodes` draft tokens, at most `depth` deep and `width` children wide.

    expand  (tree, int32[F] nodes, -1 the root) -> tokens int32[F,k], log-probabilities of them
    """
    tree = DraftTree(width)
    for _ in range(depth):
        frontier = tree.frontier()
        if len(frontier) == 0:
            break
        tree.extend(*expand(tree, frontier))
    return tree.draft(nodes)


class Model:
    """A drafter whose log-probabilities are a random function of the path; some are equal."""

    def __init__(self, seed: int, coarse: bool) -> None:
        self.seed, self.coarse = seed, coarse
        self.expanded: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def log_probs(self, path: tuple[int, ...]) -> np.ndarray:
        if path not in self._known:
            random = np.random.default_rng([self.seed, *path])
            logits = random.normal(0, 2, WORDS)
            if self.coarse:
                logits = np.round(logits / 2)
            self._known[path] = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return self._known[path]

    def expand(self, growth: DraftTree, nodes: np.ndarray, width: int):
        tokens, values = [], []
        for node in nodes:
            path = path_of(growth, int(node))
            self.expanded.append(path)
            log_probs = self.log_probs(path)
            best = np.argsort(-log_probs, kind="stable")[:width]
            tokens.append(best)
            values.append(log_probs[best])
        return np.array(tokens, np.int32), np.array(values, np.float32)

    def grow(self, width: int, depth: int, nodes: int):
        return grow(lambda growth, at: self.expand(growth, at, width), width, depth, nodes)

    def value(self, path: tuple[int, ...]) -> float:
        value = np.float32(0)
        for length, token in enumerate(path):
            value += self.log_probs(path[:length])[token]
        return float(value)


def all_paths(draft):
    paths = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return paths


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.integers(1, WORDS),
    st.integers(0, 4),
    st.integers(0, 30),
)
def test_growth_follows_the_paper(seed, coarse, width, depth, nodes):
    model = Model(seed, coarse)
    draft = model.grow(width, depth, nodes)
    # Parents first, no deeper than wanted, no two equal draft tokens below one parent.
    assert (draft.parents < np.arange(len(draft))).all()
    paths = all_paths(draft)
    assert len(set(paths)) == len(paths)
    assert max(map(len, paths), default=0) <= depth
    # Expand: the best `width` nodes of each level, by the value of their whole path.
    level, grown = [()], []
    for _ in range(depth):
        grown_now = []
        for path in level:
            log_probs = model.log_probs(path)
            best = np.argsort(-log_probs, kind="stable")[:width]
            grown_now += [(*path, int(token)) for token in best]
        grown += grown_now
        keep = sorted(range(len(grown_now)), key=lambda i: (-model.value(grown_now[i]), i))[:width]
        level = [grown_now[index] for index in sorted(keep)]
    # Rerank: the best `nodes` of all, ties to the earlier.
    order = sorted(range(len(grown)), key=lambda i: (-model.value(grown[i]), i))[:nodes]
    assert paths == [grown[index] for index in sorted(order)]
    np.testing.assert_allclose(draft.score, [np.exp(model.value(p)) for p in paths], rtol=1e-5)


@pytest.mark.parametrize("coarse", [False, True])
def test_wide_enough_growth_is_the_best_connected_tree_there_is(coarse):
    """No set of N connected nodes of the whole depth-3 tree is worth more (EAGLE-2's aim)."""
    for seed in range(40):
        model = Model(seed, coarse)
        draft = model.grow(WORDS, 3, 8)
        everything = [()]
        for _ in range(3):
            everything += [
                (*p, t) for p in everything if len(p) == len(everything[-1]) for t in range(WORDS)
            ]
        ranked = sorted((model.value(path) for path in everything if path), reverse=True)
        # Level 3 is grown below the five best of level 2 only; the best 8 lie within.
        mine = sorted((model.value(path) for path in all_paths(draft)), reverse=True)
        np.testing.assert_allclose(mine, ranked[:8], rtol=1e-5)


def test_impossible_and_broken_children_are_left_out():
    def expand(growth, at):
        tokens = np.tile(np.array([1, 2, 3, 4], np.int32), (len(at), 1))
        values = np.tile(np.array([-np.inf, np.nan, 0.5, -1.0], np.float32), (len(at), 1))
        return tokens, values

    draft = grow(expand, 4, 2, 99)
    assert draft.tokens.tolist() == [3, 4, 3, 4, 3, 4]
    assert draft.parents.tolist() == [-1, -1, 0, 0, 1, 1]
    assert draft.score.max() == 1.0
    assert (draft.score > 0).all()


def test_a_value_that_is_no_number_is_no_node_of_a_tree_grown_elsewhere():
    tokens, parents = np.array([5, 6], np.int32), np.array([-1, -1], np.int32)
    for none in (np.nan, -np.inf):
        tree = DraftTree.regrown(2, 1, tokens, parents, np.array([none, -1.0], np.float32))
        assert tree.draft(2).tokens.tolist() == [6]


def test_a_drafter_with_nothing_to_say_ends_the_growth():
    calls = []

    def expand(growth, at):
        calls.append(len(at))
        return np.zeros((len(at), 0), np.int32), np.zeros((len(at), 0), np.float32)

    assert len(grow(expand, 3, 5, 10)) == 0
    assert calls == [1]


def test_rows_grown_side_by_side_equal_rows_grown_alone():
    models = [Model(seed, False) for seed in range(3)]
    growths = [DraftTree(3) for _ in models]
    for level in range(3):
        for model, growth in zip(models, growths, strict=True):
            assert growth.levels == level
            growth.extend(*model.expand(growth, growth.frontier(), 3))
    for model, growth in zip(models, growths, strict=True):
        alone = Model(model.seed, False).grow(3, 3, 7)
        assert growth.draft(7).tokens.tolist() == alone.tokens.tolist()
        assert growth.draft(7).parents.tolist() == alone.parents.tolist()


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 9))
def test_a_full_tree_is_cut_to_what_growing_it_gives(width, levels, depth, seed):
    """DraftTree.regrown of a tree with holes, at any depth."""
    random = np.random.default_rng(seed)
    depth = min(depth, levels)
    whole, cut, full = DraftTree(width), DraftTree(width), []
    for level in range(levels):
        frontier = whole.frontier()
        rows = np.full((width if level else 1, width), -np.inf, np.float32)
        # Where there are fewer nodes to expand than the width, a full tree has holes.
        actual = np.log(random.random((len(frontier), width))).astype(np.float32)
        actual[random.random(actual.shape) < 0.1] = -np.inf
        rows[: len(frontier)] = actual
        tokens = random.integers(0, 99, rows.shape).astype(np.int32)
        base = np.append(whole.value, np.float32(0))[frontier]
        values = np.full(rows.shape, -np.inf, np.float32)
        values[: len(frontier)] = base[:, None] + actual
        full.append((tokens, frontier, values))
        whole.extend(tokens[: len(frontier)], actual)
        if level < depth:
            cut.extend(tokens[: len(frontier)], actual)
    record = _full(full, width)
    regrown = DraftTree.regrown(width, depth, *record)
    assert regrown.tokens.tolist() == cut.tokens.tolist()
    assert regrown.parents.tolist() == cut.parents.tolist()
    assert regrown.value.tolist() == cut.value.tolist()
    assert regrown.frontier().tolist() == cut.frontier().tolist()
    for nodes in (1, 3, 99):
        actual, expected = full_draft(width, depth, nodes, *record), cut.draft(nodes)
        assert actual.tokens.tolist() == expected.tokens.tolist()
        assert actual.parents.tolist() == expected.parents.tolist()
        assert actual.score.tolist() == expected.score.tolist()


def _full(levels, width):
    """Tokens, parents and values of a full tree: parents are places in it."""
    tokens, parents, values = [], [], []
    numbers = []  # Where each real node stands in the full tree.
    for token, frontier, value in levels:
        above = [numbers[node] if node >= 0 else -1 for node in frontier]
        above += [0] * (len(token) - len(above))
        for line in range(len(token)):
            for child in range(width):
                if value[line, child] > -np.inf:
                    numbers.append(len(tokens))
                tokens.append(token[line, child])
                parents.append(above[line])
                values.append(value[line, child])
    arrays = (np.array(tokens), np.array(parents), np.array(values))
    return [array.astype(kind) for array, kind in zip(arrays, "iif", strict=True)]


@pytest.mark.parametrize(
    ("width", "nodes", "holds"),
    [(3, 0, False), (3, 1, True), (3, 4, True), (3, 9, True), (3, 10, False), (2, 5, False),
     (1, 0, True), (1, 7, True)],
)  # fmt: skip
def test_a_full_tree_holds_a_blocks_best_paths_where_no_level_can_have_more(width, nodes, holds):
    assert DraftShape(nodes, width, 4).full(block=True) == holds
    assert DraftShape(nodes, width, 4).full(block=False)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_full_tree_has_width_nodes_and_then_their_squares(width):
    """As many as are grown where every node has `width` children."""
    tree = DraftTree(width)
    for level in range(5):
        assert full_size(width, level) == len(tree.tokens)
        shape = len(tree.frontier()), width
        tree.extend(np.zeros(shape, np.int32), np.zeros(shape, np.float32))


def test_the_best_path_to_the_newest_level_is_none_where_that_is_empty():
    tree, best = DraftTree(2), []
    for probs in ([[0.5, 0.25]], [[0.5], [0.75]], [[0.0], [0.0]]):
        best.append(tree.best())
        with np.errstate(divide="ignore"):
            tree.extend(np.zeros(np.shape(probs), np.int32), np.log(np.array(probs, np.float32)))
    assert [*best, tree.best()] == [-1.0, 0.5, 0.25, -1.0]


def test_a_chain_that_ends_early_is_cut_there():
    tokens, parents = np.array([5, 6, 7], np.int32), np.array([-1, 0, 1], np.int32)
    for end in (-np.inf, np.nan):
        value = np.log(np.array([0.5, 0.25, 1.0], np.float32))
        value[2] = end
        draft = full_draft(1, 3, 9, tokens, parents, value)
        assert draft.tokens.tolist() == [5, 6] and draft.parents.tolist() == [-1, 0]
        assert draft.score.tolist() == [0.5, 0.25]


def test_kept_nodes_keep_their_parents_and_sources():
    tokens, parents = np.array([5, 6, 7, 8], np.int32), np.array([-1, -1, 1, 0], np.int32)
    score = np.array([0.1, 0.9, 0.8, 0.05], np.float32)
    source = np.array([DraftSource.NGRAM, DraftSource.TABLE, DraftSource.NGRAM, 0], np.int32)
    draft = pruned(tokens, parents, score, np.array([1, 2]), source)
    assert draft.tokens.tolist() == [6, 7] and draft.parents.tolist() == [-1, 0]
    assert draft.score.tolist() == score[1:3].tolist()
    assert draft.sources() == [DraftSource.TABLE, DraftSource.NGRAM]
    # A child of what is not kept hangs below the root.
    assert pruned(tokens, parents, score, np.array([1, 3]), source).parents.tolist() == [-1, -1]


# --- blocks ----------------------------------------------------------------------------


def marginals(seed, depth, count, coarse):
    """Tokens and log-probabilities of each depth, best first; some chances are equal."""
    random = np.random.default_rng(seed)
    tokens = np.stack([random.permutation(50)[:count] for _ in range(depth)]).astype(np.int32)
    probs = random.dirichlet(np.ones(count + 1), depth)[:, :count]
    probs = np.ceil(probs * 8) / 16 if coarse else probs
    return tokens, np.log(-np.sort(-probs, 1)).astype(np.float32)


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.booleans()
)
def test_a_blocks_tree_is_the_heaviest_there_is(seed, depth, count, nodes, coarse):
    """Of all paths of all depths, enumerated: the same weights, connected, no path twice."""
    tokens, log_probs = marginals(seed, depth, count, coarse)
    draft = block_draft(tokens, log_probs, nodes)
    weights = {}
    for length in range(1, depth + 1):
        for ranks in product(range(count), repeat=length):
            path = tuple(int(tokens[level, rank]) for level, rank in enumerate(ranks))
            chosen = [float(log_probs[level, rank]) for level, rank in enumerate(ranks)]
            weights[path] = float(np.exp(sum(chosen)))
    paths = all_paths(draft)
    assert len(paths) == len(set(paths)) == min(nodes, len(weights))
    assert (draft.parents < np.arange(len(draft))).all()
    best = sorted(weights.values(), reverse=True)[:nodes]
    np.testing.assert_allclose(draft.score, best, rtol=1e-5)
    np.testing.assert_allclose(draft.score, [weights[path] for path in paths], rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_paths_whose_choices_depend_on_those_above_are_the_heaviest_there_are(seed):
    model = Model(seed, False)

    def below(path):
        log_probs = model.log_probs(path)
        order = np.argsort(-log_probs, kind="stable")
        return order.tolist(), np.exp(log_probs[order]).tolist()

    draft = path_draft(3, below, 40)
    weights = {
        path: float(np.exp(sum(model.log_probs(path[:n])[path[n]] for n in range(length))))
        for length in (1, 2, 3)
        for path in product(range(WORDS), repeat=length)
    }
    best = sorted(weights.values(), reverse=True)[:40]
    np.testing.assert_allclose(draft.score, best, rtol=1e-5)
    np.testing.assert_allclose(draft.score, [weights[p] for p in all_paths(draft)], rtol=1e-5)


def test_a_block_of_one_candidate_each_is_a_chain_and_ends_where_there_is_none():
    tokens = np.array([[4], [5], [6], [7]], np.int32)
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array([[0.5], [1.5], [0.25], [0.0]], np.float32))
    draft = block_draft(tokens, log_probs, 9)
    assert draft.tokens.tolist() == [4, 5, 6] and draft.parents.tolist() == [-1, 0, 1]
    assert draft.score.tolist() == [0.5, 0.5, 0.125]
    broken = block_draft(tokens, np.full((4, 1), np.nan, np.float32), 9)
    assert len(broken) == 0


def test_equal_offers_are_taken_in_their_order():
    first = [
        (-0.5, 2, 12, -1, None, DraftSource.NGRAM),
        (-0.5, 1, 11, -1, None, DraftSource.TABLE),
        (-0.9, 9, 10, -1, None, DraftSource.GRAMMAR),
    ]
    draft = best_first(first, lambda offer, number: [], 2)
    assert draft.tokens.tolist() == [10, 11]
    assert draft.sources() == [DraftSource.GRAMMAR, DraftSource.TABLE]
    assert len(best_first([], lambda offer, number: [], 2)) == 0


def test_equal_paths_of_a_block_are_taken_level_by_level():
    """The better ranks of a level first, then the earlier parent; whatever their tokens are."""
    tokens = np.array([[9, 8], [3, 2], [1, 0]], np.int32)
    draft = block_draft(tokens, np.zeros((3, 2), np.float32), 99)
    assert draft.tokens.tolist() == [9, 8, 3, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert draft.parents.tolist() == [-1, -1, 0, 1, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    many = block_draft(np.arange(50).reshape(2, 25), np.zeros((2, 25), np.float32), 30)
    assert many.tokens.tolist() == [*range(25), *[25] * 5]
