"""The sizes of a step: rows and nodes of a round (Size), the record that it returns, tiles of
attention of a row's nodes, and parts of long prefixes. A program of an attention kernel processes
one tile and one part of its row's prefix (triton_attention.py).
"""

from typing import Any, NamedTuple

import numpy as np

from forerun.interface.draft_model import CANDIDATES
from forerun.speculative.tree import full_size
from forerun.types import AnyArray, Ints


class Size(NamedTuple):
    """The size of a round: R rows of N nodes (see declared.py), after which full trees of draft
    tokens are built, `levels` deep; 0: none. Optional parts (shaped_rows.py), 0 if not needed:

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
        """Number of candidates for the token after the next root in a record."""
        return CANDIDATES if self.masked and self.levels else 0

    @property
    def reported(self) -> int:
        """Number of int32 elements of all nodes' log-probabilities."""
        return self.total * (1 + 2 * self.reports) if self.reports else 0


class Record(NamedTuple):
    """The parts of a record, int32.

    choices     [R*N] of nodes
    tokens, parents, count  if rounds overlap: the nodes' tokens [R*N] and, if N > 1, parents [R*N]
                and the number of nodes of each row [R]
    grown       [3*R*K] tokens, parents and value bits of the new trees
    candidates  [2*R*candidates] ids and log-probability bits of the candidates below the next roots
    reported    [R*N*(1+2*reports)] log-probabilities of nodes, see shaping.reported
    confident   [R*(1+K)] bits of a draft model's confidence in the best token below each root and
                node, if it has one
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
        """Return views of a tensor or array int32[n], with n as in RoundBuffers for this size."""
        ends = [size.total, 2 * size.total, 3 * size.total, 3 * size.total + size.rows]
        ends.append(ends[-1] + 3 * size.rows * size.draft_tokens)
        ends.append(ends[-1] + 2 * size.rows * size.candidates)
        ends.append(ends[-1] + size.reported)
        bounds = zip([0, *ends], [*ends, len(whole)], strict=True)
        return cls(*(whole[begin:end] for begin, end in bounds))


LINES = 64
"""The most queries of a tile: its nodes times the query heads per key/value head."""

KEYS = 64
"""The most keys that attention reads in one iteration."""

MOST_PARTS = 32
"""The most parts of a prefix."""

FREE_QUERIES = 512
"""Queries of a step up to which a prefix may have MOST_PARTS: the nodes that a step scores by
default (build/memory.py), so that rounds can use as many parts as their lengths suggest.
"""

PROGRAMS = 264
"""Programs to aim for: two for each of an H100's or H200's 132 multiprocessors."""


def most_parts(queries: int) -> int:
    """Return the most parts of a prefix in a step of `queries` queries: each part needs memory for
    the sums of all queries (triton_attention.py). A long prompt gets one, because its own tiles
    fill the device.
    """
    return max(1, MOST_PARTS * FREE_QUERIES // max(queries, FREE_QUERIES))


def programs_for(tiles: int, groups: int, most: int = MOST_PARTS) -> int:
    """Return the number of programs to start for each of `groups` key/value heads, over `tiles`
    tiles. most: the most parts of a prefix, from `most_parts`.
    """
    spare = max(MOST_PARTS - 1, PROGRAMS // groups - tiles)
    if most < MOST_PARTS:
        spare = most - 1
    return tiles + min(tiles * (MOST_PARTS - 1), spare)


def split_of(lengths: AnyArray, programs: int) -> Ints:
    """Return int32[programs,3]: tile, part and number of parts of each program, for tiles with
    prefixes of these lengths [T], divided into parts of about equal length. Tile -1: no work.
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
    """Return the nodes of a tile if the largest row has `nodes` nodes and `gqa_group` query heads
    share a key/value head.
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
