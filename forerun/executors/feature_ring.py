"""A ring buffer of features of accepted tokens, kept until a draft model reads them: RING_TOKENS
rows for every slot, in the order of positions.
"""

from typing import Any

import numpy as np

from forerun.interface.features import RING_TOKENS, HostFeatures
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import positions
from forerun.types import AnyArray, Ints


def ring_size(slots: int) -> int:
    """Return the rows of a ring for `slots` slots: RING_TOKENS for each."""
    return slots * RING_TOKENS


def ring_place(slots: Any, position: Any) -> Any:
    """Return the ring rows of these slots' features at these positions: integer arrays of any
    library, whose shapes broadcast. A row is overwritten RING_TOKENS tokens later.
    """
    return slots * RING_TOKENS + position % RING_TOKENS


def ring_places(plan: Plan, trees: TreeBatch, nodes: AnyArray) -> AnyArray:
    """Return int64[n], the ring rows of the flat nodes int[n] of `trees`, by their slots and
    positions.
    """
    row = np.searchsorted(trees.start, nodes, side="right") - 1
    position = positions(trees, plan.kv_len)[nodes].astype(np.int64)
    places: AnyArray = ring_place(plan.slots[row].astype(np.int64), position)
    return places


class HostFeatureRing:
    """A feature ring in host memory.

    values  float32[S*RING_TOKENS,F*H]; the system allocates memory only for slots that were written
    """

    def __init__(self, slots: int, width: int) -> None:
        self.values = np.zeros((ring_size(slots), width), np.float32)

    def at(self, slots: Ints, positions: Ints) -> HostFeatures:
        """Return copies float32[n,F*H] of the rows of slots int32[n] at positions int32[n].
        Positions that were never stored, or are overwritten, give arbitrary values.
        """
        return HostFeatures(self.values[ring_place(slots.astype(np.int64), positions)])
