"""The geometry of an eager step, from its plan, or of chains."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from forerun.executors.device_choice import DeviceNodes
from forerun.executors.torch.attention.geometry import Geometry
from forerun.executors.torch.attention.kv import PagedCache, Slots
from forerun.executors.torch.attention.tiles import (
    most_parts,
    programs_for,
    split_of,
    tile_nodes,
    tiles_of,
)
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import intervals, positions
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class StepNodes:
    """Which flat nodes of a step need what.

    choosing  int32[n] nodes that choose a token
    reported  int32[m] nodes that only report log-probabilities
    on_device  the nodes that the device decides
    places    int64[M] slots of the keys and values of all (kv.py)
    """

    choosing: Ints
    reported: Ints
    on_device: DeviceNodes
    places: Slots


def choosing_nodes(plan: Plan, trees: TreeBatch) -> Ints:
    """Return int32[n] flat nodes, ascending, at which a token is chosen: roots of rows that sample,
    and draft tokens.
    """
    if trees.decode_only:
        return np.flatnonzero(plan.samples).astype(np.int32)
    node = np.arange(len(trees.tokens), dtype=np.int32)
    row = np.repeat(np.arange(plan.rows), np.diff(trees.start))
    found: Ints = node[plan.samples[row] & (node >= trees.roots[row])]
    return found


def places_of(plan: Plan, trees: TreeBatch, cache: PagedCache) -> Slots:
    """Return int64[M], the slots for keys and values of a step's flat nodes: known tokens go to
    their pages at once, because they become permanent in any case; draft tokens to scratch, one
    after the other. Raises EngineError if a known token's position has no page.
    """
    row = np.repeat(np.arange(plan.rows), np.diff(trees.start))
    drafted = np.arange(len(row)) - trees.start[row] >= trees.known[row]
    known, position = ~drafted, positions(trees, plan.kv_len)
    places = np.empty(len(row), np.int64)
    places[known] = cache.slots_of(plan.page_table, row[known], position[known])
    places[drafted] = cache.scratch(np.arange(int(drafted.sum())))
    return places


def tree_intervals(trees: TreeBatch) -> AnyArray:
    """Return int32[2,M], enter and leave (speculative/verify.py) of every flat node."""
    deep = np.flatnonzero(trees.depth > 0)
    if np.array_equal(trees.parents[deep], deep - 1):  # Every row is a chain.
        counts = np.diff(trees.start)
        return np.stack([trees.depth, np.repeat(counts, counts)])
    bounds = pairwise(trees.start.tolist())
    spans = [intervals(trees.parents[begin:end] - begin) for begin, end in bounds]
    return np.concatenate(spans, axis=1)


def geometry_of(
    plan: Plan,
    trees: TreeBatch,
    places: Slots,
    cache: PagedCache,
    gqa_group: int,
    device: torch.device,
) -> Geometry:
    """Return the geometry of one step, copied to the device. places: int64[M] of the nodes
    (kv.py).
    """
    rows = PassRows(trees.start, plan.kv_len, plan.page_table, positions(trees, plan.kv_len))
    return rows.geometry(tree_intervals(trees), places, cache, gqa_group, device)


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of a pass: what of `Geometry` does not depend on how it is cut. All int32."""

    start: Ints
    kv_len: Ints
    table: Ints
    position: Ints

    def chains(
        self, places: AnyArray, cache: PagedCache, gqa_group: int, device: torch.device
    ) -> Geometry:
        """Return the Geometry of rows whose nodes follow each other. places int64[M]: slots of the
        nodes; the rest as in `geometry`.
        """
        counts = np.diff(self.start)
        spans = np.arange(self.start[-1]) - np.repeat(self.start[:-1], counts)
        ends = np.repeat(counts, counts)
        return self.geometry(np.stack([spans, ends]), places, cache, gqa_group, device)

    def geometry(
        self,
        tree_intervals: AnyArray,
        places: AnyArray,
        cache: PagedCache,
        gqa_group: int,
        device: torch.device,
    ) -> Geometry:
        """Return the Geometry of the rows, cut into tiles and parts, on the device. tree_intervals
        int32[2,M], places int64[M] slots of the nodes; gqa_group as of tiles.tile_nodes.
        """
        tile = tile_nodes(int(np.diff(self.start).max()), gqa_group)
        tiles = tiles_of(self.start, tile)
        programs = programs_for(len(tiles), cache.groups, most_parts(len(self.position)))

        def there(array: AnyArray) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32, order="C")).to(device)

        return Geometry(
            start=there(self.start),
            slots=there(places),
            kv_len=there(self.kv_len),
            table=there(cache.table(self.table)),
            tree_intervals=there(tree_intervals),
            tiles=there(tiles),
            tile=tile,
            page_size=cache.page_size,
            position=there(self.position),
            split=there(split_of(self.kv_len[tiles[:, 0]], programs)),
        )
