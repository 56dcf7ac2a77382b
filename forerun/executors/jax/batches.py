"""Cutting a plan into dispatches of few shapes: rounds and chunks.

A *round* is R rows of N nodes whose first node is the root: all that samples. A *chunk* is one row
of known tokens that stay whatever is accepted: everything before the root, or all of a row that
does not sample. Both are padded to sizes that were compiled at start-up. Plain decoding is one
round.

Nodes keep their streams in State.hidden, rounds' from row 0 on, chunks' from `scratch` on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from forerun.executors.jax.kv import StateShape
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints

DISPATCH = 16
"""Nodes that a dispatch costs beside its own; chosen in docs/log.md."""

_Row = tuple[int, Ints]
"""A row's number, and its flat nodes."""


class Size(NamedTuple):
    """R rows of N nodes."""

    rows: int
    nodes: int

    @property
    def total(self) -> int:
        """R*N."""
        return self.rows * self.nodes


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that programs are compiled for, ascending. Few: each costs seconds at a first start.

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
        """For trees of at most `draft_nodes` draft tokens: powers of four, then the largest."""
        rows = _powers(limits.slots)
        nodes = _powers(min(1 + draft_nodes, limits.max_nodes))
        largest = max(16, min(256, limits.max_nodes))
        chunks = (*(size for size in (16, 64) if size < largest), largest)
        # A row is padded to less than four times its nodes.
        return cls(rows, nodes, chunks, min(4 * limits.max_nodes, rows[-1] * nodes[-1]))

    @property
    def rounds(self) -> tuple[Size, ...]:
        """All sizes of rounds, the smallest first."""
        every = (Size(rows, nodes) for rows in self.rows for nodes in self.nodes)
        sizes = [size for size in every if size.rows == 1 or size.total <= self.most]
        return tuple(sorted(sizes, key=lambda size: size.total))

    def padded(self, rows: int, nodes: int) -> int:
        """Nodes of the smallest round that holds rows of so many nodes; of several, together."""
        rows, nodes = min(rows, self.rows[-1]), _at_least(self.nodes, min(nodes, self.nodes[-1]))
        size = Size(_at_least(self.rows, rows), nodes)
        return size.total if size in self.rounds else rows * nodes

    def round(self, rows: int, nodes: int) -> Size | None:
        """The size of the one round that runs rows of so many nodes; None where none does."""
        if rows > self.rows[-1] or nodes > self.nodes[-1]:
            return None
        size = Size(_at_least(self.rows, rows), _at_least(self.nodes, nodes))
        return size if size in self.rounds else None

    @property
    def widest(self) -> "Buckets":
        """The same rows with the most nodes: sizes for what is seldom done."""
        return replace(self, nodes=self.nodes[-1:])


def _powers(most: int) -> tuple[int, ...]:
    """1, 4, 16, ... below `most`, then `most`."""
    found = [1]
    while found[-1] * 4 < most:
        found.append(found[-1] * 4)
    return (*found, most) if most > 1 else (1,)


@dataclass(frozen=True)
class Batch:
    """One dispatch.

    chunk  no row samples, all nodes are known and stay
    rows   of the plan
    nodes  of each row, flat, in their order
    begins row of State.hidden of each row's first node; the others follow
    """

    size: Size
    chunk: bool
    rows: tuple[int, ...]
    nodes: tuple[Ints, ...]
    begins: tuple[int, ...]

    def places(self) -> Ints:
        """int32[R,N] rows of State.hidden of all nodes; what is no node has one, too: behind its
        row's, which in a round is its own.
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
) -> list[Batch]:
    """All dispatches of a step, chunks first. weights: of rows, of which no round has more than
    `room`; others weigh nothing.

    Of a tree that is larger than what was compiled, the first nodes run, which hold whatever is
    above them; to the others it is as if they had not been drafted.
    """
    cut: list[Batch] = []
    begin = shape.scratch
    sampling: list[_Row] = []
    for row in range(plan.rows):
        nodes = np.arange(trees.start[row], trees.start[row + 1], dtype=np.int32)
        known = int(trees.known[row])
        if plan.samples[row]:
            sampling.append((row, nodes[known - 1 :][: buckets.nodes[-1]]))
            nodes = nodes[: known - 1]
        for size, part in chunks(nodes, buckets.chunks):
            cut.append(Batch(size, True, (row,), (part,), (begin,)))
            begin += len(part)
    return cut + list(_rounds(_groups(sampling, weights or {}, room), buckets))


def _groups(rows: list[_Row], weights: dict[int, int], room: int) -> list[list[_Row]]:
    """The rows in their order, in as few groups as `room` allows."""
    groups: list[list[_Row]] = []
    held = 0
    for row in rows:
        weight = weights.get(row[0], 0)
        if not groups or held + weight > room:
            groups.append([])
            held = 0
        groups[-1].append(row)
        held += weight
    return groups


def chunks(nodes: Ints, sizes: tuple[int, ...]) -> Iterator[tuple[Size, Ints]]:
    """A row's nodes in parts, each with the size of the chunk that runs it, which cost least
    together.
    """
    while len(nodes):
        size = sizes[-1] if len(nodes) > sizes[-1] else _cheapest(len(nodes), sizes)[1]
        yield Size(1, size), nodes[:size]
        nodes = nodes[size:]


@lru_cache(maxsize=1024)
def _cheapest(count: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """What so many nodes, no more than the largest size, cost at least; the first part's size."""
    whole = _at_least(sizes, count)
    cut = [
        (size + DISPATCH + _cheapest(count - size, sizes)[0], size)
        for size in reversed(sizes)
        if size < count
    ]
    return min([(whole, whole), *cut], key=itemgetter(0))


def _rounds(groups: list[list[_Row]], buckets: Buckets) -> Iterator[Batch]:
    """One round where all rows fit into one; else some per number of nodes, without empty rows."""
    begin = 0
    for rows in groups:
        for size, some in sized(rows, buckets, len(groups) > 1):
            numbers, nodes = zip(*some, strict=True)
            begins = tuple(begin + line * size.nodes for line in range(len(some)))
            yield Batch(size, False, numbers, nodes, begins)
            begin += size.total


def sized(
    rows: list[_Row], buckets: Buckets, full: bool = False
) -> Iterator[tuple[Size, list[_Row]]]:
    """Rows in groups, each with the size of the round that runs it. full: no round has empty rows,
    so that several lists of rows take no more nodes than one.
    """
    largest = max(len(nodes) for _, nodes in rows)
    size = Size(_at_least(buckets.rows, len(rows)), _at_least(buckets.nodes, largest))
    if size in buckets.rounds and not full:
        yield size, rows
        return
    for nodes in buckets.nodes:
        left = [row for row in rows if _at_least(buckets.nodes, len(row[1])) == nodes]
        while left:
            fitting = [size for size in buckets.rounds if size.nodes == nodes]
            size = max(size for size in fitting if size.rows <= len(left))
            yield size, left[: size.rows]
            left = left[size.rows :]


def _at_least(sizes: Iterable[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
