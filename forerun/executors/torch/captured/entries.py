"""The cache entries of a round: its slots in each kind of pages, including window pages; and in the
caches of draft models the fixed tensors of the trees below it (Forest) and, for models other than
EAGLE heads, the entries after roots that are kept by slot, and the outputs of other layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.executors.layer_states import LayerStates
from forerun.executors.torch.attention.geometry import Geometry, positions_of
from forerun.executors.torch.attention.kv import PagedCache, int32s
from forerun.executors.torch.attention.window_cache import WindowCache
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.drafts.level_model import LevelModel
from forerun.executors.torch.sizes import Size, tile_nodes, tiles_of
from forerun.executors.torch.triton.kernels import Kernels
from forerun.executors.torch.triton.round_types import (
    Accepted,
    Levels,
    Prepared,
    RoundInputs,
    RoundShape,
)

Move = Callable[[Tensor, Tensor, Tensor], None]
"""(slots [n], slots to copy them to [n], bool[n] which): copies entries in all of a draft model's
layers.
"""


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round after its commit: its inputs (fixed.py), the geometry of its step, and the values
    of round_types.py.
    """

    inputs: RoundInputs
    geometry: Geometry
    prepared: Prepared
    accepted: Accepted


class KindOfPages(NamedTuple):
    """A round in one of PagedCache.kinds: its geometry, whose `slots` are in this cache, and
    `pages` int32[M] as of Prepared.
    """

    cache: PagedCache
    geometry: Geometry
    slots: Tensor
    pages: Tensor


def behind_roots(
    cache: DraftCache, committed: CommittedRound, nodes: Tensor, move: Move
) -> tuple[Prepared, Tensor]:
    """Return the entries of a step's nodes, placed after their roots, whose own entries move to
    their pages; and int32[R], the slots of the next roots. nodes: int32[R,N] their scratch slots.
    """
    prepared, inputs, last = committed.prepared, committed.inputs, committed.accepted.last[:, None]
    followed = inputs["draft_slot"] >= 0
    waiting = cache.root_begin + inputs["draft_slot"].clamp_min(0)
    move(waiting, prepared.pages.view_as(nodes)[:, 0].contiguous(), followed)
    position = prepared.position + 1
    page = (position // cache.page_size).clamp_max(inputs["table"].shape[1] - 1)
    pages = inputs["table"].gather(1, page.view_as(nodes).long())
    pages = pages * cache.page_size + position.view_as(nodes) % cache.page_size
    # The last one is kept by slot; that of a row that is not followed is not moved.
    ends = torch.where(followed[:, None], waiting[:, None], nodes)
    place = torch.arange(nodes.shape[1], device=nodes.device)
    pages = torch.where(place == last, ends, pages).int()
    entries = replace(prepared, position=position, slots=nodes.flatten(), pages=pages.flatten())
    return entries, ends.gather(1, last.long())[:, 0]


def before_of(
    model: LevelModel, states: LayerStates, committed: CommittedRound
) -> Callable[[int, Tensor], Tensor]:
    """Return Nodes.before of a round whose layers read each other's outputs: outputs [R*N,H] ->
    [R*N,H] of the node above each; for a root, the stored output of the entry before it.
    """
    inputs, size = committed.inputs, model.cache.page_size
    length, rows = inputs["kv_len"], len(inputs["kv_len"])
    page = inputs["table"].gather(1, (length // size - 1).clamp_min(0)[:, None].long())[:, 0]
    slot = states.slots + inputs["draft_slot"].clamp_min(0)
    stored = model.outputs.index_select(
        0, torch.where(length % size == 0, states.pages + page, slot)
    )
    # Roots first, then nodes.
    parents = inputs["parents"].view(rows, -1)
    row = torch.arange(rows, device=parents.device)[:, None]
    above = torch.where(parents < 0, row, rows + row * parents.shape[1] + parents).flatten()

    def before(layer: int, outputs: Tensor) -> Tensor:
        width = outputs.shape[1]
        of_roots = stored[:, layer * width : (layer + 1) * width]
        return torch.cat([of_roots, outputs]).index_select(0, above)

    return before


def keep_page_ends(
    model: LevelModel, states: LayerStates, committed: CommittedRound, outputs: Tensor
) -> None:
    """Write the outputs [R*N,W] of accepted entries that are the last of their pages to the model's
    table, for sequences that continue after these pages. Does not synchronise with the device.
    """
    prepared, size = committed.prepared, model.cache.page_size
    full = committed.accepted.on_path.flatten() & (prepared.position % size == size - 1)
    rows = torch.where(full, states.pages + prepared.pages // size, states.rows - 1)
    model.outputs.index_copy_(0, rows.long(), outputs)


def near_of(
    kernels: Kernels, shape: RoundShape, cache: WindowCache, table: Tensor, whole: KindOfPages
) -> KindOfPages:
    """Return the round in window pages, given the round in the other pages. table: int32[R,W] of
    its rows. Does not synchronise with the device.
    """
    position = positions_of(whole.geometry)
    slots, pages = kernels.near(position, whole.slots, table, shape, cache.behind)
    geometry = replace(whole.geometry, slots=slots, table=table)
    return KindOfPages(cache, geometry, slots, pages)


class Forest:
    """The trees of R rows of N nodes. The nodes that run are those of all levels but the last, [R,
    levels - 1, width]; if roots are run, each row's root precedes them. All int32.

    nodes    [R,N] scratch slots of the step's nodes; tiles, tile: of these nodes
    levels   number of levels of the trees
    start    [R+1] where each row's run nodes begin; run_slots [R,run] their scratch slots
    behind   [root + run] distance of each from the row's end, in tokens
    asking   of each level: its nodes; slots: theirs in scratch; level_tiles: tiles of them, of
             level_tile nodes at most
    chain    of each level: tree_intervals [2,R*(root + levels - 1)] if trees are chains
    """

    def __init__(self, size: Size, gqa_group: int, cache: DraftCache, device: torch.device) -> None:
        count, width = max(size.levels - 1, 1), size.width
        self.size, self.levels = size, Levels(size.levels, width)

        there = partial(int32s, device=device)

        start = np.arange(size.rows + 1, dtype=np.int32) * np.int32(size.nodes)
        self.tile = tile_nodes(size.nodes, gqa_group)
        self.tiles = there(tiles_of(start, self.tile))
        each = np.arange(size.total).reshape(size.rows, size.nodes)
        self.nodes = there(cache.scratch_begin + each)
        # Of each row the root, if there is one, and its run nodes.
        root, run = int(cache.roots), count * width
        self.start = there(np.arange(size.rows + 1) * (root + run))
        self.level_tile = tile_nodes(width, gqa_group)
        scratch = cache.scratch_begin + np.arange(size.rows * run).reshape(size.rows, count, width)
        self.run_slots = there(scratch.reshape(size.rows, run))
        nodes = np.arange(size.rows * (root + run)).reshape(size.rows, -1)
        nodes = nodes[:, root:].reshape(scratch.shape)
        self.behind = there(np.append(np.zeros(root), root + np.repeat(np.arange(count), width)))
        self.asking = [there(nodes[:, level].ravel()) for level in range(count)]
        self.slots = [there(scratch[:, level].ravel()) for level in range(count)]
        self.level_tiles = [
            there([
                (row, nodes[row, level, first], row * width + first)
                for row in range(size.rows)
                for first in range(0, width, self.level_tile)
            ])
            for level in range(count)
        ]  # fmt: skip
        # In a chain the previous node is the parent.
        ones = np.ones(size.rows * (root + count))
        below = [np.append(np.zeros(root), np.arange(count) > level) for level in range(count)]
        self.chain = [there(np.stack([np.tile(each, size.rows), ones])) for each in below]
