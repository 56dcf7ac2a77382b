"""Cutting a plan into dispatches of few shapes: rounds and chunks.

A *round* is R rows of N nodes whose first node is the root: all that samples. A *chunk* is one row
of known tokens that stay whatever is accepted: everything before the root, or all of a row that
does not sample. Both are padded to sizes that were compiled at start-up. Plain decoding is one
round.

Nodes keep their streams in State.hidden, rounds' from row 0 on, chunks' from `scratch` on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.errors import EngineError
from forerun.executors.jax.kv import StateShape
from forerun.interface.executor import ExecutorLimits
from forerun.interface.plan import Plan
from forerun.speculative.tree import TreeBatch
from forerun.types import Ints


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
    """Sizes that programs are compiled for, ascending.

    rows, nodes  of rounds: every pair that does not exceed `most` nodes
    chunks       nodes of chunks
    """

    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    chunks: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, limits: ExecutorLimits, draft_nodes: int, sparse: bool = False) -> "Buckets":
        """For trees of at most `draft_nodes` draft tokens. Powers of two; sparse: rows of four."""
        rows = _powers(limits.slots, 4 if sparse else 2)
        nodes = _powers(min(1 + draft_nodes, limits.max_nodes), 2)
        largest = max(16, min(256, _powers(limits.max_nodes, 2)[-1]))
        chunks = tuple(size for size in (16, 64, 256) if size < largest) + (largest,)
        return cls(rows, nodes, chunks, 2 * limits.max_nodes)

    @property
    def rounds(self) -> tuple[Size, ...]:
        """All sizes of rounds, the smallest first."""
        every = (Size(r, n) for r in self.rows for n in self.nodes)
        sizes = [size for size in every if size.rows == 1 or size.total <= self.most]
        return tuple(sorted(sizes, key=lambda size: size.total))


def _powers(most: int, base: int) -> tuple[int, ...]:
    """1, base, base^2, ..., the last of them not below `most`."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] * base)
    return tuple(found)


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
        """int32[R,N] rows of State.hidden of all nodes; what is no node has one, too."""
        first = np.arange(self.size.rows, dtype=np.int32) * self.size.nodes + self.begins[0]
        first[: len(self.begins)] = self.begins
        places: Ints = first[:, None] + np.arange(self.size.nodes, dtype=np.int32)
        return places


def batches(plan: Plan, trees: TreeBatch, buckets: Buckets, shape: StateShape) -> list[Batch]:
    """All dispatches of a step, chunks first. Raises EngineError where a tree is too large."""
    cut: list[Batch] = []
    begin = shape.scratch
    sampling: list[tuple[int, Ints]] = []
    for row in range(plan.rows):
        nodes = np.arange(trees.start[row], trees.start[row + 1], dtype=np.int32)
        known = int(trees.known[row])
        if plan.samples[row]:
            sampling.append((row, nodes[known - 1 :]))
            nodes = nodes[: known - 1]
        for part in _chunks(nodes, buckets.chunks):
            size = Size(1, _at_least(buckets.chunks, len(part)))
            cut.append(Batch(size, True, (row,), (part,), (begin,)))
            begin += len(part)
    return cut + list(_rounds(sampling, buckets))


def _chunks(nodes: Ints, sizes: tuple[int, ...]) -> Iterator[Ints]:
    for begin in range(0, len(nodes), sizes[-1]):
        yield nodes[begin : begin + sizes[-1]]


def _rounds(rows: list[tuple[int, Ints]], buckets: Buckets) -> Iterator[Batch]:
    """One round where all rows fit into one; else one per number of nodes, without empty rows."""
    if not rows:
        return
    largest = max(len(nodes) for _, nodes in rows)
    if largest > buckets.nodes[-1]:
        raise EngineError(
            f"a tree of {largest} nodes; at most {buckets.nodes[-1]} were compiled: raise "
            "draft-nodes"
        )
    size = Size(
        _at_least(buckets.rows, min(len(rows), buckets.rows[-1])),
        _at_least(buckets.nodes, largest),
    )
    if len(rows) <= size.rows and size in buckets.rounds:
        yield _round(size, rows, 0)
        return
    begin = 0
    for nodes in buckets.nodes:
        left = [row for row in rows if _at_least(buckets.nodes, len(row[1])) == nodes]
        while left:
            fitting = [size for size in buckets.rounds if size.nodes == nodes]
            size = max(size for size in fitting if size.rows <= len(left))
            yield _round(size, left[: size.rows], begin)
            left, begin = left[size.rows :], begin + size.total


def _round(size: Size, rows: list[tuple[int, Ints]], begin: int) -> Batch:
    numbers, nodes = zip(*rows, strict=True)
    begins = tuple(begin + line * size.nodes for line in range(len(rows)))
    return Batch(size, False, numbers, nodes, begins)


def _at_least(sizes: Iterable[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
