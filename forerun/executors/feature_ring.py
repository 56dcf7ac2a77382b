"""Where an executor keeps features of accepted tokens until a draft model reads them: a ring of
RING_TOKENS places for every slot, in the order of positions.
"""

from typing import Any

import numpy as np

from forerun.interface.features import RING_TOKENS, HostFeatures
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import positions
from forerun.types import AnyArray, Ints


def ring_size(slots: int) -> int:
    """Rows of a ring for so many slots: RING_TOKENS for each."""
    return slots * RING_TOKENS


def ring_place(slots: Any, position: Any) -> Any:
    """Where features of these slots at these positions are kept: integer arrays of any library,
    whose shapes broadcast; what stood there is RING_TOKENS tokens older.
    """
    return slots * RING_TOKENS + position % RING_TOKENS


def ring_places(plan: Plan, trees: TreeBatch, nodes: AnyArray) -> AnyArray:
    """int64[n]: the rows of the ring where features of a step's nodes stay, flat numbers int[n] of
    `trees`; by the slot and the position in tokens of each.
    """
    row = np.searchsorted(trees.start, nodes, side="right") - 1
    position = positions(trees, plan.kv_len)[nodes].astype(np.int64)
    places: AnyArray = ring_place(plan.slots[row].astype(np.int64), position)
    return places


class HostFeatureRing:
    """Kept in host memory, in 16 bits.

    values  float16[S*RING_TOKENS,F*H]: memory is taken of the slots that keep any
    """

    def __init__(self, slots: int, width: int) -> None:
        self.values = np.zeros((ring_size(slots), width), np.float16)

    def at(self, slots: Ints, positions: Ints) -> HostFeatures:
        """Copies float16[n,F*H] of what was kept for slots int32[n] at positions int32[n]. Of a
        position that was never kept, or has been overwritten since, whatever stands there.
        """
        return HostFeatures(self.values[ring_place(slots.astype(np.int64), positions)])
