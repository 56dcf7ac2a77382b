"""Where keys and values live: the pages, and the scratch of the step in progress.

One tensor [L, 2, G, slots, E] (2: keys, values). Along `slots`:

    0 .. P*page_size          pages: offset o of page p is slot p*page_size + o
    .. + max_nodes            scratch: node m of the step
    last                      null: zeros, read where there is no key, so that nothing is read
                              that another sequence left behind

A node's keys and values stay in scratch until they are committed; a rejected node's are
overwritten by the next step. Not to be confused with the sequences' slots of a plan.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.executor import ExecutorLimits
from forerun.errors import EngineError
from forerun.models.arch import Architecture
from forerun.types import Ints

Slots = NDArray[np.int64]


class PagedCache:
    """Keys and values of all sequences and of the step in progress."""

    def __init__(
        self, arch: Architecture, limits: ExecutorLimits, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._page_size, self._pages = limits.page_size, limits.pages
        self._scratch = limits.pages * limits.page_size
        self.null = self._scratch + limits.max_nodes
        shape = (arch.layers, 2, arch.kv_heads, self.null + 1, arch.head_size)
        self._kv = torch.zeros(shape, device=device, dtype=dtype)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [G, slots, E], of one layer."""
        keys, values = self._kv[layer]
        return keys, values

    def slots(self, pages: Ints, positions: Slots | Ints) -> Slots:
        """int64[T] slots of positions [T], of a sequence whose page-table row is `pages` [W].

        Raises EngineError where a position has no page.
        """
        page = pages[positions // self._page_size].astype(np.int64)
        if np.any((page < 0) | (page >= self._pages)):
            raise EngineError("a plan's position has no page: the page table is too short")
        return page * self._page_size + positions % self._page_size

    def scratch(self, nodes: Ints) -> Slots:
        """int64[n] slots of flat nodes of the step in progress."""
        return self._scratch + nodes.astype(np.int64)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put the step's keys and values [M,G,E] of one layer into scratch.

        What is not finite is moved into the key: a mask hides a NaN there from the nodes that
        must not see it, while among values zero times NaN would spoil them.
        """
        keys = keys + (keys * 0 + values * 0).sum(-1, keepdim=True)
        values = values.nan_to_num(0, 0, 0)
        place = self._kv[layer, :, :, self._scratch : self._scratch + len(keys)]
        place[0], place[1] = keys.transpose(0, 1), values.transpose(0, 1)

    def commit(self, nodes: Ints, slots: Slots) -> None:
        """Copy nodes [n] from scratch into page slots [n], all layers."""
        source = torch.from_numpy(self.scratch(nodes)).to(self._kv.device)
        target = torch.from_numpy(slots).to(self._kv.device)
        self._kv.index_copy_(3, target, self._kv.index_select(3, source))


def cache_bytes(arch: Architecture, limits: ExecutorLimits, item: int) -> int:
    """Bytes of a PagedCache whose numbers take `item` bytes each."""
    slots = limits.pages * limits.page_size + limits.max_nodes + 1
    return arch.layers * 2 * arch.kv_heads * arch.head_size * slots * item
