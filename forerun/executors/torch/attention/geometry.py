"""Who sees what in a step, as tensors that kernels read: rows, pages and trees.

A node's ancestors are told by two numbers per node, `enter` and `leave`, instead of an N x N mask:
see forerun.speculative.verify.intervals.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.attention.kv import CacheTensor
from forerun.executors.torch.decoder.float8 import Rows
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


class Attend(Protocol):
    """Attention over pages and trees, launched."""

    def __call__(
        self,
        queries: Tensor,
        keys: CacheTensor,
        values: CacheTensor,
        geometry: Geometry,
        spec: AttentionSpec | None = None,
        *,
        float8: bool = False,
        sinks: Tensor | None = None,
    ) -> Rows:
        """Context [Q,A,E] of queries [Q,A,E] over keys and values of a layer, whose scores are
        made as `spec` says; None: scaled by 1/sqrt(E), no window. float8: as float8 rows [Q,A*E].
        sinks: float32[A], where the spec has them. Of latent attention [Q,A,rank].
        """
        ...
