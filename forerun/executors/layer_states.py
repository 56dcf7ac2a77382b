"""The table rows where MTP layers, one per depth, store and read hidden states
(drafts/prediction_layers.py).

Layer k + 1 reads, at the next token, the output o_k of layer k. The position of an entry is that of
the token before its own, as in every draft cache: entry q of layer k is for t_{q+1} and reads
o_{k-1} of entry q - 1. Each layer has one table of states [rows, H]:

    node 0 .. max_nodes - 1   draft nodes; tokens of an extension, which overwrites them
    slot 0 .. slots - 1       a sequence's last entry: its root
    page 0 .. pages - 1       a page's last entry, for a sequence that continues shared pages
    last                      the input of a sequence's first entry, which no query attends to
"""

from dataclasses import dataclass

import numpy as np

from forerun.errors import EngineError
from forerun.executors.draft_model import DraftNodes
from forerun.interface.draft_model import DraftExtension, DraftLevel
from forerun.interface.executor import ExecutorLimits
from forerun.types import AnyArray, Ints


@dataclass(frozen=True, slots=True)
class StoredStates:
    """The states that an extension stores: those of its nodes `nodes` int[n], to rows `targets`
    int[n] of the tables.
    """

    nodes: AnyArray
    targets: AnyArray


class LayerStates:
    """Row numbers of the tables, and the depth of draft nodes; the executor owns the tables.

    rows          number of rows of a table
    slots, pages  first row of the slots, and of the pages
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.slots, self.pages = limits.max_nodes, limits.max_nodes + limits.slots
        self.rows = self.pages + limits.pages + 1
        self._page_size = limits.page_size
        self._nodes = DraftNodes(limits.max_nodes)

    def before(self, extension: DraftExtension) -> Ints:
        """Return int32[n]: the table row of the entry before each token of an extension; for the
        first token after a cached position, one written by `stored`.
        """
        rows = np.arange(-1, len(extension.tokens) - 1, dtype=np.int32)
        for row, first in enumerate(extension.start[:-1]):
            length = int(extension.kv_len[row])
            if length == 0:
                rows[first] = self.rows - 1
            elif length % self._page_size:
                rows[first] = self.slots + extension.slots[row]
            else:
                rows[first] = self.pages + extension.pages[row, length // self._page_size - 1]
        return rows

    def stored(self, extension: DraftExtension) -> StoredStates:
        """Return the states that an extension must store: each row's last entry, by slot, and the
        last entry of each full page, by page.
        """
        position, size = extension.position, self._page_size
        row = np.repeat(np.arange(len(extension.kv_len)), np.diff(extension.start))
        full = np.flatnonzero(position % size == size - 1)
        pages = self.pages + extension.pages[row[full], position[full] // size]
        return StoredStates(
            np.append(extension.start[1:] - 1, full),
            np.append(self.slots + extension.slots, pages),
        )

    def above(self, level: DraftLevel) -> Ints:
        """Return int32[n]: the table row of the entry above each draft token of a level, which is a
        draft node's or the root's.
        """
        slots = np.repeat(self.slots + level.slots, np.diff(level.start))
        rows: Ints = np.where(level.parents < 0, slots, level.parents).astype(np.int32)
        return rows

    def depth(self, level: DraftLevel) -> int:
        """Return the depth of a level's tokens, 1 for children of roots, and store it for the
        levels below. Raises EngineError unless all have the same depth.
        """
        above = self._nodes.add(level)
        if np.any(above != above[0]):
            raise EngineError("a draft step was refused: tokens of one level differ in depth")
        return int(above[0]) + 1


def layers_at(depth: int, count: int) -> range:
    """Return which of `count` layers (from 0) run for tokens at a depth: the first of them predicts
    the next token, the others only prepare the states that deeper tokens read.
    """
    return range(min(depth, count - 1), count)


def layer_read(layer: int, depth: int, count: int) -> int:
    """Return the layer whose states layer `layer` reads for tokens at this depth: the one before
    it, or itself beyond the last layer's depth.
    """
    return layer if depth >= count else layer - 1
