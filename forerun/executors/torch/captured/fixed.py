"""The inputs and outputs of a captured round: tensors at fixed addresses. The inputs of all sizes
share one buffer on the device, because rounds run one after the other, and two on the host, used in
turn (round.py): it fills one while a round reads the other.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.executors.packed import Shapes, total, views_of
from forerun.executors.torch.shaping import RULES
from forerun.executors.torch.sizes import Size, programs_for, split_of, tile_nodes, tiles_of
from forerun.speculative.accept import NOTHING
from forerun.types import Ints

SENT = ("sent", "near_sent")
"""Names of the updates of page tables, and of tables of window pages (PagedCache.kinds)."""


class BufferDims(NamedTuple):
    """The dimensions that all sizes share: entries of a page table's row, slots of sequences, query
    heads per key/value head, vocabulary size, key/value heads, tokens of a page; and the names in
    SENT that are used.
    """

    width: int
    slots: int
    gqa_group: int
    vocab: int
    groups: int
    page_size: int
    sent: tuple[str, ...] = SENT[:1]


def changes_of(size: Size, page_size: int) -> int:
    """Return the most page table entries sent with a round: the pages that its rows' new positions
    may begin, and those of the previous round, if its outcome was not read yet.
    """
    return size.rows * (1 + -(-2 * size.nodes // page_size))


def _tiles(size: Size, dims: BufferDims) -> int:
    return size.rows * -(-size.nodes // tile_nodes(size.nodes, dims.gqa_group))


def _shapes(size: Size, dims: BufferDims) -> Shapes:
    """Return the shapes of the inputs, all int32, in the order of their addresses.

    Of rows, [R]:
        where [2,R]     kv_len and position (of the root's output); also under these names
        count (nodes), low and high halves of the seed, temperature (its bits), decided
        draft_slot      slot of the draft model's state of a row; -1 = it does not follow the row
        slot            where the round leaves what the next one needs (FutureState)
        copies          row of recurrent states that gets a copy (PathNodes); -1 = none
        carried         1: begin with the FutureState of `slot`; then the host knows only:
        most, deep, last  most draft tokens and levels, and the last position that a draft token
                          may take
    Of nodes, [R*N]: tokens, parents and depth within the row; tree_intervals [2,R*N]. Of page
    tables (PageTables): sent_to [D,2] the places of entries, 64 bits each, and sent [D] their
    pages; the same of window pages. Of attention: split [P,3] (sizes.py). If shaping is needed:
    RULES of rows; the grammars' masks [R*N,ceil(V/32)], and each node's mask, -1 = none.
    """
    of_rows = "count", "low", "high", "temperature", "decided", "draft_slot", "copies"
    optional: Shapes = {}
    if size.shaping:
        optional |= dict.fromkeys(RULES, (size.rows,))
    if size.masked:
        optional |= {"mask_row": (size.total,), "masks": (size.total, -(-dims.vocab // 32))}
    changes = changes_of(size, dims.page_size)
    return {
        # First, because reads of 64 bits must be aligned.
        **{f"{name}_to": (changes, 2) for name in dims.sent},
        **dict.fromkeys(dims.sent, (changes,)),
        "where": (2, size.rows),
        **dict.fromkeys((*of_rows, "slot", "carried", "most", "deep", "last"), (size.rows,)),
        **dict.fromkeys(("tokens", "parents", "depth"), (size.total,)),
        "tree_intervals": (2, size.total),
        "split": (programs_for(_tiles(size, dims), dims.groups), 3),
        **optional,
    }


def room_of(rows: int, nodes: int, dims: BufferDims) -> int:
    """Return the number of int32 elements of the inputs of a round with at most `rows` rows and
    `nodes` nodes in all.
    """
    largest = Size(rows, -(-nodes // rows), shaping=1, masked=1)
    count = total(_shapes(largest, dims))
    # Other sizes have more tiles, and more changes.
    count += 3 * programs_for(nodes, dims.groups)
    return count + 3 * len(dims.sent) * (2 * rows + -(-2 * nodes // dims.page_size))


class RoundBuffers:
    """The fixed tensors of one size, at the beginning of the device buffer `room`, int32[room_of].

    flat, buffers  the inputs; buffers also have `start`, int32[R+1], where each row's nodes begin
    record  int32[3*R*N + R + 3*R*K + ..] the results, in one copy, see `Record`, of which
            `confident` elements are a draft model's confidences
    blank   the inputs of a round in which no row has a node, up to the masks, which are then not
            read
    """

    def __init__(self, size: Size, dims: BufferDims, room: Tensor, confident: int = 0) -> None:
        self.size, self._shapes = size, _shapes(size, dims)
        returned = 3 * size.total + size.rows + 3 * size.rows * size.draft_tokens
        returned += 2 * size.rows * size.candidates
        returned += size.reported + confident
        self.flat = room[: total(self._shapes)]
        start = np.arange(size.rows + 1, dtype=np.int32) * size.nodes
        self.buffers = self.views(self.flat) | {"start": torch.from_numpy(start).to(room.device)}
        self.record = torch.zeros(returned, dtype=torch.int32, device=room.device)
        self.tile = tile_nodes(size.nodes, dims.gqa_group)
        self.tiles = torch.from_numpy(tiles_of(start, self.tile)).to(room.device)
        self.blank = self._blank(dims)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of inputs int32[.] of this size, by name."""
        views = views_of(flat, self._shapes)
        return views | {"kv_len": views["where"][0], "position": views["where"][1]}

    def _blank(self, dims: BufferDims) -> Ints:
        size, flat = self.size, torch.zeros(len(self.flat), dtype=torch.int32)
        blank = self.views(flat)
        for name in dims.sent:
            blank[f"{name}_to"].view(torch.int64)[:] = dims.slots * dims.width
        blank["parents"][:] = NOTHING
        blank["draft_slot"][:] = blank["copies"][:] = -1
        blank["slot"][:] = dims.slots
        parts = split_of(np.zeros(len(self.tiles), np.int32), len(blank["split"]))
        blank["split"][:] = torch.from_numpy(parts)
        # Padding nodes attend only to themselves.
        alone = torch.arange(size.nodes, dtype=torch.int32).repeat(size.rows) + 2 * size.nodes
        blank["tree_intervals"][:] = torch.stack([alone, alone + 1])
        if size.masked:
            blank["mask_row"][:] = -1
            flat = flat[: -blank["masks"].numel()]
        return flat.numpy().copy()
