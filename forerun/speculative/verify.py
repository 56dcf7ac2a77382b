"""Tree attention: every node sees the cached prefix, its ancestors and itself.

As in SpecInfer (arXiv 2305.09781, section 4.2) and Medusa (arXiv 2401.10774, section 2.3.1).
tests/references/verify.py is the reference for executors.
"""

import numpy as np

from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


def intervals(parents: Ints) -> Ints:
    """Return int32[2,N], enter and leave of one row's nodes: an ancestor mask in two numbers per
    node.

    Walk the tree depth first and count: `enter` is the count when the walk reaches a node, `leave`
    when it has left the last node below it. Then node j is node i or an ancestor of it exactly if
    enter[j] <= enter[i] < leave[j]. Each row counts from 0.

    parents  int32[N] within the row, each before its children; below 0 for the first node
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
    """Return int32[M]: each node's position in its sequence, for RoPE and pages.

    kv_len  int32[B] cached tokens of every row
    """
    return (np.repeat(kv_len, np.diff(trees.start)) + trees.depth).astype(np.int32)
