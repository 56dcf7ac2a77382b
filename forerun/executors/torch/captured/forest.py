"""The fixed tensors of draft trees that rounds of one size grow: made once, before any of them."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forerun.executors.torch.attention.tiles import tile_nodes, tiles_of
from forerun.executors.torch.drafts.draft_cache import DraftCache
from forerun.executors.torch.triton.record import Size
from forerun.executors.torch.triton.round_types import Levels


class Forest:
    """Of R rows of N nodes, whose trees' nodes that run are those of all levels but the last, [R,
    levels - 1, width]; where roots are run, each row's stands before them. All int32.

    nodes    [R,N] scratch slots of the step's nodes; tiles, tile: of these nodes
    levels   the trees' size
    start    [R+1] where each row's run nodes begin; run_slots [R,run] their scratch slots
    behind   [root + run] how far each is behind the row's end, in tokens
    asking   of each level: its nodes; slots: theirs in scratch; level_tiles: tiles of them, of
             level_tile nodes at most
    chain    of each level: tree_intervals [2,R*(root + levels - 1)] where trees are chains
    """

    def __init__(self, size: Size, gqa_group: int, cache: DraftCache, device: torch.device) -> None:
        count, width = max(size.levels - 1, 1), size.width
        self.size, self.levels = size, Levels(size.levels, width)

        def there(array: ArrayLike) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32)).to(device)

        start = np.arange(size.rows + 1, dtype=np.int32) * np.int32(size.nodes)
        self.tile = tile_nodes(size.nodes, gqa_group)
        self.tiles = there(tiles_of(start, self.tile))
        each = np.arange(size.total).reshape(size.rows, size.nodes)
        self.nodes = there(cache.scratch_begin + each)
        # Of each row the root, where there is one, and its run nodes.
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
