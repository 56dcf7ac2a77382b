"""Where a device keeps features of accepted tokens until a draft model reads them: a ring of
MOST_KEPT places for every slot, in the order of positions.
"""

from typing import Any

import numpy as np

from forerun.interface.features import MOST_KEPT
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import positions
from forerun.types import AnyArray


def ring_size(slots: int) -> int:
    """Places of so many slots."""
    return slots * MOST_KEPT


def ring_place(slots: Any, position: Any) -> Any:
    """Where features of these slots at these positions are kept: integer arrays of any library,
    whose shapes broadcast; what stood there is MOST_KEPT tokens older.
    """
    return slots * MOST_KEPT + position % MOST_KEPT


def ring_places(plan: Plan, trees: TreeBatch, nodes: AnyArray) -> AnyArray:
    """int64[n] places of a step's flat nodes int[n]."""
    row = np.searchsorted(trees.start, nodes, side="right") - 1
    position = positions(trees, plan.kv_len)[nodes].astype(np.int64)
    places: AnyArray = ring_place(plan.slots[row].astype(np.int64), position)
    return places
