"""What the target computes: every node sees the cached prefix, its ancestors and itself.

Tree attention as in SpecInfer (arXiv 2305.09781, section 4.2) and Medusa (arXiv 2401.10774,
section 2.3.1). This is the reference; executors are held to it by parity tests.
"""

import numpy as np

from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Bools, Floats, Ints


def ancestor_mask(trees: TreeBatch, row: int) -> Bools:
    """bool[N,N]: mask[i, j] is true where node j of `row` is node i or one of its ancestors."""
    first = int(trees.start[row])
    parents = trees.parents[first : int(trees.start[row + 1])] - first
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def intervals(parents: Ints) -> Ints:
    """int32[2,N]: enter and leave of one row's nodes; the first node's parent is below 0.

    `ancestor_mask` in two numbers per node. Walk the tree depth first and count: `enter` is the
    count when the walk reaches a node, `leave` when it has left the last node below it. Then node j
    is node i or an ancestor of it exactly where enter[j] <= enter[i] < leave[j]. Each row counts
    from 0.

    parents  int32[N] within the row, each before its children
    """
    count = len(parents)
    order = np.arange(count, dtype=np.int32)
    if np.array_equal(parents[1:], order[:-1]):
        return np.stack([order, np.full_like(order, count)])
    above = parents.tolist()
    size = [1] * count
    for node in range(count - 1, 0, -1):
        size[above[node]] += size[node]
    enter, taken = [0] * count, [1] * count
    for node in range(1, count):
        enter[node] = enter[above[node]] + taken[above[node]]
        taken[above[node]] += size[node]
    return np.cumsum(np.array([enter, size], np.int32), 0, dtype=np.int32)


def positions(trees: TreeBatch, kv_len: Ints) -> Ints:
    """int32[M]: position of every node, given int32[B] cached tokens of every row."""
    return (np.repeat(kv_len, np.diff(trees.start)) + trees.depth).astype(np.int32)


def attend(
    queries: Floats,
    prefix: tuple[Floats, Floats],
    tree: tuple[Floats, Floats],
    mask: Bools,
) -> Floats:
    """Attention of one row's nodes over the prefix, all of it visible, and the tree.

    queries       float32[N,A,E], already rotated
    prefix, tree  keys and values, float32[T,G,E] and float32[N,G,E]; A is a multiple of G
    mask          bool[N,N] from `ancestor_mask`

    Returns float32[N,A,E], computed in float64.
    """
    nodes, heads, size = queries.shape
    keys, values = (
        np.concatenate(pair).astype(np.float64) for pair in zip(prefix, tree, strict=True)
    )
    visible = np.concatenate([np.ones((nodes, len(prefix[0])), np.bool_), mask], axis=1)
    grouped = queries.astype(np.float64).reshape(nodes, keys.shape[1], -1, size)
    scores = np.einsum("ngre,tge->ngrt", grouped, keys) / np.sqrt(size)
    scores = np.where(visible[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: AnyArray = np.einsum("ngrt,tge->ngre", weights, values)
    return mixed.reshape(nodes, heads, size).astype(np.float32)
