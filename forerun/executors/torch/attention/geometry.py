"""Which keys each node attends to in a step, as tensors for kernels: rows, pages and trees.

Two numbers per node, `enter` and `leave`, describe its ancestors instead of an N x N mask:
see forerun.speculative.verify.intervals.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.torch.attention.kv import CacheTensor
from forerun.networks.layer_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Geometry:
    """A step's rows, pages and trees on the device; all int32.

    start   [B+1]  row b owns nodes start[b]:start[b+1]
    slots   [M]    slots of every node's keys and values (see kv.py): in scratch, or, for chains,
                   already in their pages
    kv_len  [B]    cached tokens, all visible
    table   [B,W]  page of position p is table[b, p // page_size]; only entries below kv_len are
                   read
    tree_intervals  [2,M]  enter and leave of every node (speculative/verify.py)
    position [M]   of every node, in tokens; None if every layer attends to all positions before a
                   node
    tiles   [T,3]  row, first node and first query of every tile: up to `tile` consecutive nodes of
                   a row
    asking  [Q]    node of every query; None if every node has one
    begin   the first position that other nodes may attend to; a node always attends to itself
    split   [P,3]  see tiles.split_of; None: as many parts for every tile
    both_ways  nodes may attend to later ones of their row; else no node attends beyond its tile
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


def positions_of(geometry: Geometry) -> Tensor:
    """Return the nodes' positions int32[M], in tokens, which a layer with a window needs. Raises
    EngineError if the step has none.
    """
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the context [Q,A,E] of queries [Q,A,E] over keys and values of a layer, scored by
        `spec`; None: scaled by 1/sqrt(E), no window. sinks: float32[A], if the spec has them. For
        latent attention [Q,A,rank].
        """
        ...
