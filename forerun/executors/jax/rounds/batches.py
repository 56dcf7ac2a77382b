"""Divides a plan into dispatches of few shapes: rounds and chunks.

A *round* is R rows of N nodes whose first node is the root: all rows that sample. A *chunk* is one
row of known tokens that are permanent whatever is accepted: everything before the root, or all of a
row that does not sample. Both are padded to sizes that were compiled at start-up. Plain decoding is
one round.

State.hidden has the nodes' streams, rounds' from row 0 on, chunks' from `scratch` on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from forerun.executors.jax.network.kv import StateShape
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints

DISPATCH = 16
"""Overhead of a dispatch, in nodes: 14 ms against 1.2 ms per node on a CPU."""

Row = tuple[int, Ints]
"""A row's number, and its flat nodes."""


class Bucket(NamedTuple):
    """R rows of N nodes."""

    rows: int
    nodes: int

    @property
    def total(self) -> int:
        """R*N, nodes of a dispatch with its padding."""
        return self.rows * self.nodes


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that programs are compiled for, ascending. Only a few, because each takes seconds at a
    first start.

    rows, nodes  of rounds: every pair that does not exceed `most` nodes
    chunks       nodes of chunks
    most         nodes of all rounds of a step, padding included
    """

    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    chunks: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, limits: ExecutorLimits, draft_nodes: int) -> "Buckets":
        """Return the sizes for these limits and trees of at most `draft_nodes` draft tokens: rows
        and nodes in powers of four, then the largest; chunks of 32 and at most 256 known tokens.
        """
        rows = _powers(limits.slots)
        nodes = _powers(min(1 + draft_nodes, limits.max_nodes))
        largest = max(16, min(256, limits.max_nodes))
        chunks = (32, largest) if largest > 32 else (largest,)
        # A row is padded to less than four times its nodes.
        return cls(rows, nodes, chunks, min(4 * limits.max_nodes, rows[-1] * nodes[-1]))

    @property
    def rounds(self) -> tuple[Bucket, ...]:
        """All sizes of rounds that programs are compiled for, ascending by nodes with padding."""
        every = (Bucket(rows, nodes) for rows in self.rows for nodes in self.nodes)
        sizes = [size for size in every if size.rows == 1 or size.total <= self.most]
        return tuple(sorted(sizes, key=lambda size: size.total))

    def round(self, rows: int, nodes: int) -> Bucket | None:
        """Return the size of the one round that runs `rows` rows of `nodes` nodes; None if none
        does.
        """
        if rows > self.rows[-1] or nodes > self.nodes[-1]:
            return None
        size = Bucket(_at_least(self.rows, rows), _at_least(self.nodes, nodes))
        return size if size in self.rounds else None

    @property
    def widest(self) -> "Buckets":
        """A copy with the same rows and only the most nodes: sizes for passes that are rare."""
        return replace(self, nodes=self.nodes[-1:])

    @property
    def narrowest(self) -> "Buckets":
        """A copy with the same rows of one node: sizes for passes that run roots alone."""
        return replace(self, nodes=(1,))


def _powers(most: int) -> tuple[int, ...]:
    """Return 1, 4, 16, ... below `most`, then `most`."""
    found = [1]
    while found[-1] * 4 < most:
        found.append(found[-1] * 4)
    return (*found, most) if most > 1 else (1,)


@dataclass(frozen=True)
class Batch:
    """One dispatch.

    chunk  whether no row samples and all nodes are known and permanent
    rows   of the plan
    nodes  of each row, flat, in their order
    begins row of State.hidden of each row's first node; the others follow
    """

    size: Bucket
    chunk: bool
    rows: tuple[int, ...]
    nodes: tuple[Ints, ...]
    begins: tuple[int, ...]

    def places(self) -> Ints:
        """Return int32[R,N], the row of State.hidden for each node, in the order of the nodes. The
        padding of a plan's row gets the rows after that row's nodes.
        """
        first = np.arange(self.size.rows, dtype=np.int32) * self.size.nodes + self.begins[0]
        first[: len(self.begins)] = self.begins
        places: Ints = np.add.outer(first, np.arange(self.size.nodes, dtype=np.int32))
        return places


def batches(
    plan: Plan,
    trees: TreeBatch,
    buckets: Buckets,
    shape: StateShape,
    room: int = 0,
    weights: dict[int, int] | None = None,
    cuts: dict[int, list[int]] | None = None,
) -> list[Batch]:
    """Return all dispatches of a step, prompt chunks first, in the order in which they must run.

    shape    where chunks begin in State.hidden
    weights  by row of the plan: number of edits of its logits (shaping.py); 0 for other rows
    room     the most edits of a round's rows together
    cuts     by row of the plan: numbers of known tokens, ascending, after which a chunk ends

    Of a tree larger than the largest round only the first nodes run, which include all of their
    ancestors; the others count as not drafted.
    """
    cut: list[Batch] = []
    begin = shape.scratch
    sampling: list[Row] = []
    for row in range(plan.rows):
        nodes = np.arange(trees.start[row], trees.start[row + 1], dtype=np.int32)
        known = int(trees.known[row])
        if plan.samples[row]:
            sampling.append((row, nodes[known - 1 :][: buckets.nodes[-1]]))
            nodes = nodes[: known - 1]
        for piece in np.split(nodes, (cuts or {}).get(row, [])):
            for size, part in chunks(piece, buckets.chunks):
                cut.append(Batch(size, True, (row,), (part,), (begin,)))
                begin += len(part)
    return cut + list(_rounds(_groups(sampling, weights or {}, room), buckets))


def _groups(rows: list[Row], weights: dict[int, int], room: int) -> list[list[Row]]:
    """Return the rows in their order, in as few groups as `room` allows."""
    groups: list[list[Row]] = []
    held = 0
    for row in rows:
        weight = weights.get(row[0], 0)
        if not groups or held + weight > room:
            groups.append([])
            held = 0
        groups[-1].append(row)
        held += weight
    return groups


def chunks(nodes: Ints, sizes: tuple[int, ...]) -> Iterator[tuple[Bucket, Ints]]:
    """Divide the flat nodes int32[n] of one row into chunks, each with its Bucket, so that padding
    plus DISPATCH nodes per chunk are minimal.

    sizes  of chunks, ascending
    """
    while len(nodes):
        size = sizes[-1] if len(nodes) > sizes[-1] else _cheapest(len(nodes), sizes)[1]
        yield Bucket(1, size), nodes[:size]
        nodes = nodes[size:]


@lru_cache(maxsize=1024)
def _cheapest(count: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the least cost of `count` nodes, at most the largest size; and the first part's
    size.
    """
    whole = _at_least(sizes, count)
    cut = [
        (size + DISPATCH + _cheapest(count - size, sizes)[0], size)
        for size in reversed(sizes)
        if size < count
    ]
    return min([(whole, whole), *cut], key=itemgetter(0))


def _rounds(groups: list[list[Row]], buckets: Buckets) -> Iterator[Batch]:
    """Yield one round if all rows fit into one; else some per number of nodes, without empty
    rows.
    """
    begin = 0
    for rows in groups:
        for size, group in sized(rows, buckets, len(groups) > 1):
            numbers, nodes = zip(*group, strict=True)
            begins = tuple(begin + line * size.nodes for line in range(len(group)))
            yield Batch(size, False, numbers, nodes, begins)
            begin += size.total


def sized(
    rows: list[Row], buckets: Buckets, full: bool = False
) -> Iterator[tuple[Bucket, list[Row]]]:
    """Divide rows into rounds: yields each round's Bucket with its rows, which are all of one
    padded width unless one round has room for them all.

    rows  (row of the plan, its flat nodes), at least one
    full  allow no empty rows, so that several lists of rows take no more nodes than one
    """
    size = buckets.round(len(rows), max(len(nodes) for _, nodes in rows))
    if size is not None and not full:
        yield size, rows
        return
    for nodes in buckets.nodes:
        left = [row for row in rows if _at_least(buckets.nodes, len(row[1])) == nodes]
        while left:
            fitting = [size for size in buckets.rounds if size.nodes == nodes]
            size = max(size for size in fitting if size.rows <= len(left))
            yield size, left[: size.rows]
            left = left[size.rows :]


def dispatches(start: Ints, buckets: Buckets) -> Iterator[tuple[Bucket, list[Row]]]:
    """Yield the dispatches of chains, row r of nodes start[r]:start[r+1]: rounds of the rows that
    fit into one, and chunks of each other.
    """
    every = np.arange(start[-1], dtype=np.int32)
    rows = list(enumerate(np.split(every, start[1:-1])))
    short = [row for row in rows if len(row[1]) <= buckets.nodes[-1]]
    if short:
        yield from sized(short, buckets)
    for row, nodes in rows:
        if len(nodes) > buckets.nodes[-1]:
            yield from ((size, [(row, part)]) for size, part in chunks(nodes, buckets.chunks))


def _at_least(sizes: Iterable[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
