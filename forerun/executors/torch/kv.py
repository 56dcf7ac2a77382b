"""Where keys and values live: the pages, and the scratch of the step in progress.

A target has one such cache, its draft head another with one layer and the same pages.

One tensor [L, 2, G, slots, E] (2: keys, values). Along `slots`:

    0 .. P*page_size          pages: offset o of page p is slot p*page_size + o
    .. + max_nodes            scratch: node m of the step
    last                      null: zeros, read where there is no key, so that nothing is read
                              that another sequence left behind

A node's keys and values stay in scratch until they are committed; a rejected node's are
overwritten by the next step. Not to be confused with the sequences' slots of a plan.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.executor import ExecutorLimits
from forerun.errors import EngineError
from forerun.types import Ints

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What is kept of a position: E numbers for each of G heads, twice, in each of L layers."""

    layers: int
    kv_heads: int
    head_size: int

    def bytes(self, limits: ExecutorLimits, item: int) -> int:
        """Bytes of a PagedCache of this shape whose numbers take `item` bytes each."""
        slots = limits.pages * limits.page_size + limits.max_nodes + 1
        return self.layers * 2 * self.kv_heads * self.head_size * slots * item


class PagedCache:
    """Keys and values of all sequences and of the step in progress."""

    def __init__(
        self, shape: KvShape, limits: ExecutorLimits, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.page_size, self._pages = limits.page_size, limits.pages
        self.scratch_begin = limits.pages * limits.page_size
        self.null = self.scratch_begin + limits.max_nodes
        sizes = (shape.layers, 2, shape.kv_heads, self.null + 1, shape.head_size)
        self._kv = torch.zeros(sizes, device=device, dtype=dtype)
        self.device = device

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G, slots, E], of one layer."""
        keys, values = self._kv[layer]
        return keys, values

    def slots(self, pages: Ints, positions: Slots | Ints) -> Slots:
        """int64[T] slots of positions [T], of a sequence whose page-table row is `pages` [W].

        Raises EngineError where a position has no page.
        """
        page = pages[positions // self.page_size].astype(np.int64)
        if np.any((page < 0) | (page >= self._pages)):
            raise EngineError("a plan's position has no page: the page table is too short")
        return page * self.page_size + positions % self.page_size

    def scratch(self, nodes: Ints) -> Slots:
        """int64[n] slots of flat nodes of the step in progress."""
        return self.scratch_begin + nodes.astype(np.int64)

    def write(self, layer: int, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Put keys and values [M,G,E] of one layer into scratch, as nodes first, first+1, ...

        What is not finite is moved into the key: a mask hides a NaN there from the nodes that
        must not see it, while among values zero times NaN would spoil them.
        """
        keys = keys + (keys * 0 + values * 0).sum(-1, keepdim=True)
        values = values.nan_to_num(0, 0, 0)
        begin = self.scratch_begin + first
        place = self._kv[layer, :, :, begin : begin + len(keys)]
        place[0], place[1] = keys.transpose(0, 1), values.transpose(0, 1)

    def commit(self, nodes: Ints, slots: Slots) -> None:
        """Copy nodes [n] from scratch into page slots [n], all layers."""
        source = torch.from_numpy(self.scratch(nodes)).to(self.device)
        self.move(source, torch.from_numpy(slots).to(self.device))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` [n] to slots `target` [n], all different, in all layers."""
        self._kv.index_copy_(3, target, self._kv.index_select(3, source))
