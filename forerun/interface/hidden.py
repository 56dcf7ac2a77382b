"""Selects the nodes of a step whose hidden states are copied to the host, for embeddings."""

import numpy as np

from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


def hidden_nodes(plan: Plan, trees: TreeBatch) -> Ints:
    """Return int32[n] flat nodes, row after row, whose hidden states `Plan.hidden` requests."""
    counts = [0] * plan.rows if plan.hidden is None else plan.hidden.tolist()
    rows = zip(trees.roots.tolist(), counts, strict=True)
    nodes = [node for root, count in rows for node in range(root + 1 - count, root + 1)]
    return np.array(nodes, np.int32)
