"""What a device may choose by itself: nodes of rows whose choice the temperature alone shapes."""

from dataclasses import dataclass

import numpy as np

from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Floats, Ints

ON_HOST = -1.0
"""Instead of a temperature: the host decides the slot's rows, or the slot is closed."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """How sequences choose where the temperature alone shapes it; a device may do it in its own
    way.

    temperature  float32[S] by slot; 0 = greedy, ON_HOST
    seed         uint64[S] of their requests
    prompt_len   int32[S] tokens before output position 0
    """

    temperature: Floats
    seed: AnyArray
    prompt_len: Ints


@dataclass(frozen=True, slots=True)
class PlainNodes:
    """The nodes of plain rows, from the roots on.

    nodes         int32[n] flat, ascending
    seeds         uint64[n] of their requests
    positions     int32[n] output position that each decides
    temperatures  float32[n]; 0 = greedy
    """

    nodes: Ints
    seeds: AnyArray
    positions: Ints
    temperatures: Floats


def plain_nodes(choosing: Choosing, plan: Plan, trees: TreeBatch) -> PlainNodes:
    """The nodes of rows that sample and that neither a parameter beyond the temperature nor a
    grammar touches, from their roots on: n nodes, none where there is no such row.
    """
    temperatures = choosing.temperature[plan.slots]
    asked = np.flatnonzero((temperatures >= 0) & plan.samples & ~plan.constrained)
    first, stop = trees.roots[asked], trees.start[1:][asked]
    nodes, counts = _ranges(first, stop), stop - first
    depth = trees.depth[nodes] - np.repeat(trees.depth[first], counts)
    slots = plan.slots[asked]
    positions = plan.kv_len[asked] + trees.known[asked] - choosing.prompt_len[slots]
    return PlainNodes(
        nodes=nodes,
        seeds=np.repeat(choosing.seed[slots], counts),
        positions=np.repeat(positions, counts) + depth,
        temperatures=np.repeat(temperatures[asked], counts),
    )


def _ranges(first: AnyArray, stop: AnyArray) -> Ints:
    """int32[.] first[0] .. stop[0]-1, first[1] .. stop[1]-1, ..."""
    counts = stop - first
    ends = counts.cumsum()
    ranges = np.arange(ends[-1] if len(ends) else 0) + (stop - ends).repeat(counts)
    found: Ints = ranges.astype(np.int32)
    return found
