"""Tree attention, written down once for reading: every node sees the prefix, its ancestors, itself.

SpecInfer (arXiv 2305.09781, section 4.2), Medusa (arXiv 2401.10774, section 2.3.1).
"""

import numpy as np

from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Bools, Floats


def ancestor_mask(trees: TreeBatch, row: int) -> Bools:
    """bool[N,N]: mask[i, j] is true where node j of `row` is node i or one of its ancestors."""
    first = int(trees.start[row])
    parents = trees.parents[first : int(trees.start[row + 1])] - first
    mask = np.eye(len(parents), dtype=np.bool_)
    for node in range(1, len(parents)):
        mask[node] |= mask[parents[node]]
    return mask


def attend(
    queries: Floats, prefix: tuple[Floats, Floats], tree: tuple[Floats, Floats], mask: Bools
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
