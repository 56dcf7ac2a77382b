"""Who sees what in a step, as tensors that kernels read: rows, pages and trees.

A node's ancestors are told by two numbers per node, `enter` and `leave`, instead of an N x N mask:
see forerun.speculative.verify.intervals.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.float8 import Rows, float8_rows
from forerun.executors.torch.kv import CacheTensor, read
from forerun.executors.torch.layers import softcapped
from forerun.models.layer_spec import AttentionSpec
from forerun.types import AnyArray, Ints

LINES = 64
"""Queries of a tile, at most: its nodes times the heads that share a key/value head."""


KEYS = 64
"""Keys that attention looks at in one turn, at most."""

MOST_PARTS = 32
"""Parts of a prefix, at most."""

FREE_QUERIES = 512
"""Queries of a step up to which a prefix may have MOST_PARTS: the nodes that a step scores by
default (build/memory.py), so that rounds are cut as their lengths want it."""

PROGRAMS = 264
"""Programs worth having: two for each of an H100's or H200's 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A step's rows, pages and trees on the device; all int32.

    start   [B+1]  row b owns nodes start[b]:start[b+1]
    slots   [M]    where every node's keys and values are (see kv.py): in scratch, or, of chains,
                   in their pages already
    kv_len  [B]    cached tokens, all visible
    table   [B,W]  page of position p is table[b, p // page_size]; only entries below kv_len
                   are read
    tree_intervals  [2,M]  enter and leave of every node (speculative/verify.py)
    position [M]   of every node, in tokens; None where every layer sees all before a node
    tiles   [T,3]  row, first node and first query of every tile: up to `tile` consecutive nodes of
                   a row
    asking  [Q]    node of every query; None where every node asks
    begin   the first position that others may see; a node sees itself wherever it is
    split   [P,3]  see split_of; None: as many parts for every tile
    both_ways  nodes may see later ones of their row; else nobody sees who comes after its tile
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


def most_parts(queries: int) -> int:
    """Parts of a prefix, at most, in a step of so many queries: for each part there is room for
    all queries' sums (triton_attention.py), which long prompts must not multiply. They fill the
    device with their own tiles.
    """
    return max(1, MOST_PARTS * FREE_QUERIES // max(queries, FREE_QUERIES))


def programs_for(tiles: int, groups: int, most: int = MOST_PARTS) -> int:
    """Programs worth having, for each of `groups` key/value heads, over so many tiles. most: parts
    of a prefix; kernels make room for as many as there are programs more than tiles.
    """
    spare = max(MOST_PARTS - 1, PROGRAMS // groups - tiles)
    if most < MOST_PARTS:
        spare = most - 1
    return tiles + min(tiles * (MOST_PARTS - 1), spare)


def split_of(lengths: AnyArray, programs: int) -> Ints:
    """int32[programs,3]: tile, part and parts of each program, for tiles whose prefixes are so long
    [T]: parts of about the same length, whatever the lengths are. Tile -1: nothing to do.
    """
    spare = programs - len(lengths)
    longest = max(-(-int(lengths.sum()) // max(spare, 1)), 1)
    longest = -(-longest // KEYS) * KEYS
    parts = np.clip(-(-lengths // longest), 1, MOST_PARTS if spare else 1)
    found = np.full((programs, 3), (-1, 0, 1), np.int32)
    count, first = int(parts.sum()), np.cumsum(parts) - parts
    found[:count, 0] = np.repeat(np.arange(len(lengths)), parts)
    found[:count, 1] = np.arange(count) - np.repeat(first, parts)
    found[:count, 2] = np.repeat(parts, parts)
    return found


WIDE = 256
"""Numbers of a head beyond which a tile holds half as many queries, of few heads."""


def program_heads(gqa_group: int, size: int) -> int:
    """How many of the heads, of `size` numbers, that share a key/value head one program takes: all,
    but of wide heads 16 at most (latent attention, where all heads share one).
    """
    most = gqa_group if size <= WIDE else min(gqa_group, 16)
    return next(heads for heads in range(most, 0, -1) if gqa_group % heads == 0)


def tile_heads(gqa_group: int, size: int) -> int:
    """As how many heads `tile_nodes` counts them."""
    return program_heads(gqa_group, size) * (2 if size > WIDE else 1)


def tile_nodes(nodes: int, gqa_group: int) -> int:
    """Nodes of a tile where the largest row has `nodes` and `gqa_group` heads share their keys."""
    tile = 1
    while tile < nodes and 2 * tile * gqa_group <= LINES:
        tile *= 2
    return tile


def tiles_of(start: Ints, tile: int) -> Ints:
    """int32[T,3] tiles of the rows that start, and end, at start[B+1]. Every node asks."""
    found = [
        (row, first, first)
        for row in range(len(start) - 1)
        for first in range(int(start[row]), int(start[row + 1]), tile)
    ]
    return np.array(found, np.int32).reshape(-1, 3)


def positions_of(geometry: Geometry) -> Tensor:
    """Its positions, where a layer does not see all. Raises EngineError without them."""
    if geometry.position is None:
        raise EngineError("a layer has a sliding window, but the step's positions were not given")
    return geometry.position


def attend_dense(
    queries: Tensor,
    keys: CacheTensor,
    values: CacheTensor,
    geometry: Geometry,
    spec: AttentionSpec | None = None,
    float8: bool = False,
    sinks: Tensor | None = None,
) -> Rows:
    """Context [Q,A,E] of queries [Q,A,E] over one layer's keys and values.

    The slow twin of the kernels: every page of every table is read, then masked. Shapes depend
    on shapes alone, so it can be captured.

    spec    how scores are made; None: scaled by 1/sqrt(E), no window
    float8  give the context as float8 rows [Q,A*E] instead
    sinks   float32[A]: a score of each head that carries no value
    """
    size, width, count = queries.shape[2], geometry.table.shape[1], len(geometry.slots)
    nodes = torch.arange(count, device=queries.device)
    row_of = torch.searchsorted(geometry.start[1:].contiguous(), nodes.int(), right=True)
    asking = nodes if geometry.asking is None else geometry.asking.long()
    row = row_of[asking]
    position = torch.arange(width * geometry.page_size, device=queries.device)
    page = geometry.table.long().clamp_min(0)[:, position // geometry.page_size]
    slots = (page * geometry.page_size + position % geometry.page_size)[row]
    spec = spec or AttentionSpec(size**-0.5)
    cached = position < geometry.kv_len[row, None]
    enter, leave = geometry.tree_intervals
    step = enter[asking, None]
    own = (enter <= step) & (step < leave) & (row_of == row[:, None])
    if spec.window is not None or geometry.begin:
        mine = positions_of(geometry)
        oldest = mine.clamp_max(geometry.begin)
        if spec.window is not None:
            oldest = torch.maximum(oldest, mine - spec.window + 1)
        oldest = oldest[asking, None]
        cached &= position >= oldest
        own &= mine >= oldest
    seen = torch.cat([cached, own], 1)
    slots = torch.cat([slots, geometry.slots.long().expand(len(asking), -1)], 1)
    # [G, M, T, E]; what is not seen is read as zero, because NaN times zero is NaN.
    key, value = (
        torch.where(seen[..., None], read(cached, slots), 0.0).float() for cached in (keys, values)
    )
    grouped = queries.float().unflatten(1, (len(keys), -1)).transpose(0, 1)
    scores = torch.einsum("gmae,gmte->gmat", grouped, key) * spec.scale
    scores = softcapped(scores, spec.softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        shape = *scores.shape[:3], 1
        scores = torch.cat([scores, sinks.view(len(keys), 1, -1, 1).expand(shape)], -1)
    weights = scores.softmax(-1)[..., : seen.shape[1]]
    context = torch.einsum("gmat,gmte->mgae", weights, value).flatten(1, 2).to(queries.dtype)
    return float8_rows(context.flatten(1)) if float8 else context
