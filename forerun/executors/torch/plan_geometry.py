"""The geometry of an eager step, from its plan."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.geometry import (
    Geometry,
    programs_for,
    split_of,
    tile_nodes,
    tiles_of,
)
from forerun.executors.torch.kv import PagedCache
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.speculative.verify import intervals, positions
from forerun.types import AnyArray


def geometry_of(
    plan: Plan, trees: TreeBatch, cache: PagedCache, gqa_group: int, device: torch.device
) -> Geometry:
    """The geometry of one step, copied to the device."""
    bounds = list(pairwise(trees.start.tolist()))
    spans = [intervals(trees.parents[begin:end] - begin) for begin, end in bounds]
    tile = tile_nodes(int(np.diff(trees.start).max()), gqa_group)
    tiles = tiles_of(trees.start, tile)
    programs = programs_for(len(tiles), cache.groups)

    def there(array: AnyArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

    return Geometry(
        start=there(trees.start),
        slots=there(cache.scratch(np.arange(len(trees.tokens), dtype=np.int32))),
        kv_len=there(plan.kv_len),
        table=there(plan.page_table),
        tree_intervals=there(np.concatenate(spans, axis=1)),
        tiles=there(tiles),
        tile=tile,
        page_size=cache.page_size,
        position=there(positions(trees, plan.kv_len)),
        split=there(split_of(plan.kv_len[tiles[:, 0]], programs)),
    )
