"""A step's way through recurrent states in torch, level by level; on CUDA, and where there is no
compiled core. Its twin, to the bit, is delta_native.py.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.kv import indices
from forerun.executors.torch.decoder.delta import Tokens, advance, read
from forerun.speculative.tree import TreeBatch
from forerun.types import AnyArray, Ints


class DeltaWalk(Protocol):
    """Advances the states float32[rows,Hv,Dk,Dv] of a layer along a step's trees."""

    def way(self, trees: TreeBatch, slots: Ints, ends: dict[int, int]) -> Any:
        """Return what all layers of a step share.

        slots  int32[B] rows of states at which the trees begin
        ends   row of states -> the known node whose state it gets
        """
        ...

    def advance(self, states: Tensor, way: Any, tokens: Tokens) -> Tensor:
        """Return float32[M,Hv,Dv], the nodes' results. Writes the states after known tokens."""
        ...

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Advance the states of rows int32[n], which all differ, by one token each; tokens: of n
        nodes. Writes `states`.
        """
        ...


@dataclass(frozen=True, slots=True)
class DepthLevel:
    """Nodes of equal depth, as a slice of all nodes ordered by depth.

    above   int64[n] the parents' places in the level above; None: in the same order
    ends    int64[m] places whose states are stored, and int64[m] the rows to store them in
    """

    begin: int
    end: int
    above: Tensor | None
    ends: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class LevelWay:
    """Order: int64[M] the nodes by depth; back: int64[M] each one's place in that; rows: int64[B]
    of states that the trees begin with.
    """

    order: Tensor
    back: Tensor
    rows: Tensor
    levels: list[DepthLevel]


class ByLevels:
    """The state of a node is made of its parent's, all nodes of a level at once; a known chain is a
    tree without branches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def way(self, trees: TreeBatch, slots: Ints, ends: dict[int, int]) -> LevelWay:
        """Return a LevelWay, as DeltaWalk.way; its int64 tensors are on the states' device."""
        count = len(trees.tokens)
        order = np.argsort(trees.depth, kind="stable")
        back = np.empty(count, np.int64)
        back[order] = np.arange(count)
        levels = self._levels(trees, order, back, ends)
        device = self._device
        rows = indices(order, device), indices(back, device), indices(slots, device)
        return LevelWay(*rows, levels)

    def advance(self, states: Tensor, way: LevelWay, tokens: Tokens) -> Tensor:
        """Implement DeltaWalk.advance: float32[M,Hv,Dv], nodes of equal depth at once."""
        sorted_tokens, found = tokens.ordered(way.order), []
        here = states.index_select(0, way.rows)
        for level in way.levels:
            if level.above is not None:
                here = here.index_select(0, level.above)
            entering = sorted_tokens.part(level.begin, level.end)
            advance(here, entering)
            found.append(read(here, entering))
            if level.ends is not None:
                states[level.ends[1]] = here[level.ends[0]]
        return torch.cat(found).index_select(0, way.back)

    def follow(self, states: Tensor, rows: Ints, tokens: Tokens) -> None:
        """Implement DeltaWalk.follow: read the rows int32[n] of `states`, advance them by a token,
        write them back.
        """
        where = indices(rows, self._device)
        here = states.index_select(0, where)
        advance(here, tokens)
        states[where] = here

    def _levels(
        self, trees: TreeBatch, order: AnyArray, back: AnyArray, ends: dict[int, int]
    ) -> list[DepthLevel]:
        counts = np.bincount(trees.depth).tolist()
        at: dict[int, list[tuple[int, int]]] = {}
        for target, node in ends.items():
            at.setdefault(int(trees.depth[node]), []).append((int(back[node]), target))
        levels, begin, width = [], 0, counts[0]
        for depth, count in enumerate(counts):
            nodes, above = order[begin : begin + count], None
            if depth:
                places = back[trees.parents[nodes]] - (begin - width)
                if count != width or np.any(places != np.arange(count)):
                    above = indices(places, self._device)
            kept = None
            if depth in at:
                places, targets = zip(*at[depth], strict=True)
                first = indices(np.array(places) - begin, self._device)
                kept = first, indices(np.array(targets), self._device)
            levels.append(DepthLevel(begin, begin + count, above, kept))
            begin, width = begin + count, count
        return levels
