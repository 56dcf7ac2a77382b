"""How a step is cut: rows and nodes of a round (Size) and the record that it returns; nodes of a
row into tiles of attention, and long prefixes into parts.

A program of an attention kernel takes one tile and one part of its row's prefix
(triton_attention.py).
"""

from typing import Any, NamedTuple

import numpy as np

from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.tree import full_size
from forerun.types import AnyArray, Ints


class Size(NamedTuple):
    """R rows of N nodes (see declared.py), which then grow full trees of draft tokens, `levels`
    deep; 0: none. Further needs of rows (shaped_rows.py): 0, or

    shaping  which sampling parameters
    masked   whether a row has a grammar
    reports  alternatives to report with each token
    """

    rows: int
    nodes: int
    levels: int = 0
    width: int = 0
    shaping: int = 0
    masked: int = 0
    reports: int = 0

    @property
    def total(self) -> int:
        """R*N: nodes of all rows, padding included."""
        return self.rows * self.nodes

    @property
    def draft_tokens(self) -> int:
        """K: nodes of a full tree, 0 without levels."""
        return full_size(self.width, self.levels)

    @property
    def candidates(self) -> int:
        """How many candidates for the token after the next root a record has."""
        return CANDIDATES if self.masked and self.levels else 0

    @property
    def reported(self) -> int:
        """How many numbers the reports of all nodes are."""
        return self.total * (1 + 2 * self.reports) if self.reports else 0


class Record(NamedTuple):
    """The parts of a record: the choices of nodes [R*N]; where rounds carry on from each other,
    their tokens and, where N > 1, parents [R*N] and how many nodes each row has [R]; tokens,
    parents and values' bits of the trees that were grown, [3*R*K]; what may follow the roots of
    the next trees, ids and bits of log-probabilities [2*R*candidates]; reports of nodes
    [R*N*(1+2*reports)], see shaping.reported; bits of how sure a draft model is of the best token
    below each root and node, [R*(1+K)] if it says that.
    """

    choices: Any
    tokens: Any
    parents: Any
    count: Any
    grown: Any
    candidates: Any
    reported: Any
    confident: Any

    @classmethod
    def of(cls, size: Size, whole: Any) -> "Record":
        """Return views of a tensor or array int32[n], n as RoundBuffers makes it for this size."""
        ends = [size.total, 2 * size.total, 3 * size.total, 3 * size.total + size.rows]
        ends.append(ends[-1] + 3 * size.rows * size.draft_tokens)
        ends.append(ends[-1] + 2 * size.rows * size.candidates)
        ends.append(ends[-1] + size.reported)
        bounds = zip([0, *ends], [*ends, len(whole)], strict=True)
        return cls(*(whole[begin:end] for begin, end in bounds))


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
    """Return into how many parts a step of `queries` queries may divide a prefix: each part needs
    memory for the sums of all queries (triton_attention.py). A long prompt gets one: its own tiles
    fill the device.
    """
    return max(1, MOST_PARTS * FREE_QUERIES // max(queries, FREE_QUERIES))


def programs_for(tiles: int, groups: int, most: int = MOST_PARTS) -> int:
    """Return how many programs to start for each of `groups` key/value heads, over `tiles` tiles.
    most: parts of a prefix; kernels have room for as many as there are programs more than
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
