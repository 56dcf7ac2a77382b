"""A step's way through recurrent states, node by node in plain torch: where there is no compiled
core, and the twin, to the bit, of delta_native.py.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.delta import Tokens, advance, read
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class DeltaWay:
    """What all layers of a step share; arrays that the compiled core reads.

    start    int32[R+1]  row r owns nodes start[r]:start[r+1]
    known    int32[R] how many first nodes of a row, a chain, are permanent, at least one
    parents  int32[M] flat; -1: none
    slots    int64[R] rows of states at which the trees begin, and that get the states after known
             nodes
    targets  int64[M] row of states that gets a copy of the state after a node; -1: none
    """

    start: AnyArray
    known: AnyArray
    parents: AnyArray
    slots: AnyArray
    targets: AnyArray

    @staticmethod
    def of(trees: TreeBatch, slots: Ints, ends: dict[int, int]) -> "DeltaWay":
        """Return that of a step.

        slots  int32[R] as above
        ends   row of states -> the known node whose state it gets
        """
        targets = np.full(len(trees.tokens), -1, np.int64)
        for row, node in ends.items():
            if row not in slots:
                targets[node] = row
        start, known, parents = (
            np.ascontiguousarray(each, np.int32)
            for each in (trees.start, trees.known, trees.parents)
        )
        return DeltaWay(start, known, parents, slots.astype(np.int64), targets)


class DeltaWalk(Protocol):
    """Advances the states float32[rows,Hv,Dk,Dv] of a layer along a step's trees."""

    def advance(self, states: Tensor, way: DeltaWay, tokens: Tokens) -> Tensor:
        """Return float32[M,Hv,Dv], the nodes' results. Writes the states after known tokens."""
        ...

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Advance the states of rows int32[n], which all differ, by one token each; tokens: of n
        nodes. Writes `states`.
        """
        ...


class PlainDelta:
    """A node's state is made of its parent's, one after the other."""

    def advance(self, states: Tensor, way: DeltaWay, tokens: Tokens) -> Tensor:
        """Implement DeltaWalk.advance."""
        found = torch.zeros_like(tokens.values)

        def run(here: Tensor, node: int) -> None:
            mine = tokens.part(node, node + 1)
            advance(here, mine)
            found[node] = read(here, mine)[0]

        rows = zip(way.slots.tolist(), way.start.tolist(), way.known.tolist(), strict=False)
        for row, (slot, begin, known) in enumerate(rows):
            here = states[slot : slot + 1].clone()
            for node in range(begin, begin + known):
                run(here, node)
                if way.targets[node] >= 0:
                    states[int(way.targets[node])] = here[0]
            states[slot] = here[0]
            made = {begin + known - 1: here}
            for node in range(begin + known, int(way.start[row + 1])):
                made[node] = made[int(way.parents[node])].clone()
                run(made[node], node)
        return found

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Implement DeltaWalk.follow: all rows at once."""
        where = indices(rows, states.device)
        here = states.index_select(0, where)
        advance(here, tokens)
        states[where] = here
