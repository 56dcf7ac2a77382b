"""Find the nodes of a step that a device may decide without the host: their tokens are chosen from
the logits by temperature, seed and cut-offs alone.
"""

from dataclasses import dataclass

import numpy as np

from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Bools, Floats, Ints

CUT_OFFS = np.dtype([("top_p", np.float64), ("log_min_p", np.float32), ("top_k", np.int32)])
"""Cut-offs of a request as in Sampling (`CutOffs` of csrc/model.h)."""

LEAST_TOP_P = 2.0**-60
"""A top_p below this, 0 included, leaves one token: the most probable token always exceeds it.
Device code, which keeps the tokens above a probability mass, raises a smaller top_p to this.
"""


@dataclass(frozen=True, slots=True)
class Choosing:
    """Sampling state by slot, for devices that choose tokens.

    on_device    bool[S] whether a device may decide the slot's rows: its sequence has no parameter
                 that the device does not support; False for a closed slot
    temperature  float32[S]; 0 = greedy
    seed         uint64[S] of the slots' requests
    prompt_len   int32[S] tokens before output position 0
    cut_offs     CUT_OFFS[S]; without effect at temperature 0
    """

    on_device: Bools
    temperature: Floats
    seed: AnyArray
    prompt_len: Ints
    cut_offs: AnyArray


@dataclass(frozen=True, slots=True)
class DeviceNodes:
    """The nodes that a device decides: the root and the draft tokens of their rows.

    nodes         int32[n] flat, ascending
    seeds         uint64[n] of their requests
    positions     int32[n] the output position that each decides
    temperatures  float32[n]; 0 = greedy
    """

    nodes: Ints
    seeds: AnyArray
    positions: Ints
    temperatures: Floats


def device_nodes(choosing: Choosing, plan: Plan, trees: TreeBatch) -> DeviceNodes:
    """Return the nodes, from the roots down, of the sampling rows without a grammar that a device
    may decide.
    """
    on_device = choosing.on_device[plan.slots]
    rows = np.flatnonzero(on_device & plan.samples & ~plan.constrained)
    first, stop = trees.roots[rows], trees.start[1:][rows]
    nodes, counts = _ranges(first, stop), stop - first
    depth = trees.depth[nodes] - np.repeat(trees.depth[first], counts)
    slots = plan.slots[rows]
    positions = plan.kv_len[rows] + trees.known[rows] - choosing.prompt_len[slots]
    return DeviceNodes(
        nodes=nodes,
        seeds=np.repeat(choosing.seed[slots], counts),
        positions=np.repeat(positions, counts) + depth,
        temperatures=np.repeat(choosing.temperature[slots], counts),
    )


def _ranges(first: AnyArray, stop: AnyArray) -> Ints:
    """Return int32[.] first[0] .. stop[0]-1, first[1] .. stop[1]-1, ..."""
    counts = stop - first
    ends = counts.cumsum()
    ranges = np.arange(ends[-1] if len(ends) else 0) + (stop - ends).repeat(counts)
    flat: Ints = ranges.astype(np.int32)
    return flat
