"""What the target computes: every node sees the cached prefix, its ancestors and itself.

Tree attention as in SpecInfer (arXiv 2305.09781, section 4.2) and Medusa (arXiv 2401.10774,
section 2.3.1). tests/twins/verify.py is the reference that executors are held to.
"""

import numpy as np

from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


def intervals(parents: Ints) -> Ints:
    """int32[2,N]: enter and leave of one row's nodes; the first node's parent is below 0.

    An ancestor mask in two numbers per node. Walk the tree depth first and count: `enter` is the
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
    """int32[M]: each node's position in its sequence, which RoPE and pages go by.

    kv_len  int32[B] cached tokens of every row
    """
    return (np.repeat(kv_len, np.diff(trees.start)) + trees.depth).astype(np.int32)
