"""The keys that each node of a step attends to, as tensors for kernels: rows, pages and trees; and
the nodes of an eager step that need each result. Two numbers per node, `enter` and `leave`,
describe its ancestors instead of an N x N mask: see forerun.speculative.verify.intervals.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.device_choice import DeviceNodes
from forerun.executors.torch.attention.kv import CacheTensor, PagedCache, Slots, int32s
from forerun.executors.torch.sizes import (
    most_parts,
    programs_for,
    split_of,
    tile_nodes,
    tiles_of,
)
from forerun.interface.plan import Plan
from forerun.networks.layer_spec import AttentionSpec
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import intervals, positions
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class Geometry:
    """A step's rows, pages and trees on the device; all int32.

    start   [B+1]  row b has nodes start[b]:start[b+1]
    slots   [M]    slots of every node's keys and values (see kv.py): in scratch, or, for chains,
                   already in their pages
    kv_len  [B]    cached tokens, all attended to
    table   [B,W]  page of position p is table[b, p // page_size]; only entries below kv_len are
                   read
    tree_intervals  [2,M]  enter and leave of every node (speculative/verify.py)
    position [M]   of every node, in tokens; None if every layer attends to all positions before a
                   node
    tiles   [T,3]  row, first node and first query of every tile: up to `tile` consecutive nodes of
                   a row
    asking  [Q]    node of every query; None if every node has one
    begin   the first position that other nodes may attend to; a node always attends to itself
    split   [P,3]  see sizes.split_of; None: every tile is split into the same number of parts
    both_ways  nodes may attend to later ones of their row; else no node attends beyond its tile
    """

    start: Tensor
    slots: Tensor
    kv_len: Tensor
    table: Tensor
    tree_intervals: Tensor
    tiles: Tensor
    tile: int
    page_size: int
    position: Tensor | None = None
    asking: Tensor | None = None
    begin: int = 0
    split: Tensor | None = None
    both_ways: bool = False


def positions_of(geometry: Geometry) -> Tensor:
    """Return the nodes' positions int32[M], in tokens, which a layer with a window needs. Raises
    EngineError if the step has none.
    """
    if geometry.position is None:
        raise EngineError("a layer has a sliding window, but the step's positions were not given")
    return geometry.position


class Attend(Protocol):
    """Attention over pages and trees, without synchronising with the device."""

    def __call__(
        self,
        queries: Tensor,
        keys: CacheTensor,
        values: CacheTensor,
        geometry: Geometry,
        spec: AttentionSpec | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [Q,A,E] of queries [Q,A,E] over keys and values of a layer,
        scored by `spec`; None: scaled by 1/sqrt(E), no window. sinks: float32[A], if the spec has
        them. For latent attention [Q,A,rank].
        """
        ...


@dataclass(frozen=True, slots=True)
class StepNodes:
    """The flat nodes of a step by the results that they need.

    choosing  int32[n] nodes that choose a token
    reported  int32[m] nodes that only report log-probabilities
    on_device  the nodes that the device decides
    places    int64[M] slots of all nodes' keys and values (kv.py)
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
    """Return int64[M], the slots for keys and values of a step's flat nodes: known tokens are
    written directly to their pages, because they become permanent in any case; draft tokens to
    scratch. Raises EngineError if a known token's position has no page.
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
    """Return the geometry of one step, copied to the device. places: int64[M], the nodes' slots
    (kv.py).
    """
    place, intervals = positions(trees, plan.kv_len), tree_intervals(trees)
    rows = PassRows(trees.start, plan.kv_len, plan.page_table, place, intervals)
    return rows.geometry(places, cache, gqa_group, device)


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of a pass: the part of `Geometry` that is independent of tiles. All int32.
    tree_intervals None: each row is a chain.
    """

    start: Ints
    kv_len: Ints
    table: Ints
    position: Ints
    tree_intervals: AnyArray | None = None

    def geometry(
        self, places: AnyArray, cache: PagedCache, gqa_group: int, device: torch.device
    ) -> Geometry:
        """Return the Geometry of the rows, divided into tiles and parts, on the device. places
        int64[M]: slots of the nodes; gqa_group as of sizes.tile_nodes.
        """
        counts, intervals = np.diff(self.start), self.tree_intervals
        if intervals is None:
            depth = np.arange(self.start[-1]) - np.repeat(self.start[:-1], counts)
            intervals = np.stack([depth, np.repeat(counts, counts)])
        tile = tile_nodes(int(counts.max()), gqa_group)
        tiles = tiles_of(self.start, tile)
        programs = programs_for(len(tiles), cache.groups, most_parts(len(self.position)))
        there = partial(int32s, device=device)
        return Geometry(
            start=there(self.start),
            slots=there(places),
            kv_len=there(self.kv_len),
            table=there(cache.table(self.table)),
            tree_intervals=there(intervals),
            tiles=there(tiles),
            tile=tile,
            page_size=cache.page_size,
            position=there(self.position),
            split=there(split_of(self.kv_len[tiles[:, 0]], programs)),
        )
