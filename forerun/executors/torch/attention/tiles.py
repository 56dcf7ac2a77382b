"""How attention's work is divided: nodes of a row into tiles, long prefixes into parts.

A program of a kernel takes one tile and one part of its row's prefix (triton_attention.py).
"""

import numpy as np

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


def most_parts(queries: int) -> int:
    """Return the most parts of a prefix in a step of so many queries: for each part there is room
    for all queries' sums (triton_attention.py), which long prompts must not multiply. They fill the
    device with their own tiles.
    """
    return max(1, MOST_PARTS * FREE_QUERIES // max(queries, FREE_QUERIES))


def programs_for(tiles: int, groups: int, most: int = MOST_PARTS) -> int:
    """Return the number of useful programs, for each of `groups` key/value heads, over so many
    tiles. most: parts of a prefix; kernels have room for as many as there are programs more than
    tiles.
    """
    spare = max(MOST_PARTS - 1, PROGRAMS // groups - tiles)
    if most < MOST_PARTS:
        spare = most - 1
    return tiles + min(tiles * (MOST_PARTS - 1), spare)


def split_of(lengths: AnyArray, programs: int) -> Ints:
    """Return int32[programs,3]: tile, part and parts of each program, for tiles with prefixes of
    these lengths [T]: parts of about equal length. Tile -1: nothing to do.
    """
    spare = programs - len(lengths)
    longest = max(-(-int(lengths.sum()) // max(spare, 1)), 1)
    longest = -(-longest // KEYS) * KEYS
    parts = np.minimum(np.maximum(-(-lengths // longest), 1), MOST_PARTS if spare else 1)
    tile = np.repeat(np.arange(len(lengths)), parts)
    found = np.empty((programs, 3), np.int32)
    found[:] = -1, 0, 1
    busy = found[: len(tile)]
    busy[:, 0] = tile
    busy[:, 1] = np.arange(len(tile)) - (np.cumsum(parts) - parts)[tile]
    busy[:, 2] = parts[tile]
    return found


def tile_nodes(nodes: int, gqa_group: int) -> int:
    """Return the nodes of a tile if the largest row has `nodes` and `gqa_group` heads share their
    keys.
    """
    tile = 1
    while tile < nodes and 2 * tile * gqa_group <= LINES:
        tile *= 2
    return tile


def tiles_of(start: Ints, tile: int) -> Ints:
    """Return int32[T,3], tiles of the rows with bounds start[B+1]. Every node is a query."""
    found = [
        (row, first, first)
        for row in range(len(start) - 1)
        for first in range(int(start[row]), int(start[row + 1]), tile)
    ]
    return np.array(found, np.int32).reshape(-1, 3)
