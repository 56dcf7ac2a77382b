"""The inputs and outputs of a captured round: tensors at fixed addresses.

The inputs of all sizes share one buffer: one on the device, because rounds run one after the
other; two on the host, used in turn (StagingBuffer): it fills one while a round reads the other.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.tiles import programs_for, split_of, tile_nodes, tiles_of
from forerun.executors.torch.shaping import RULES
from forerun.executors.torch.triton.record import Size
from forerun.interface.plan import Plan
from forerun.speculative.accept import NOTHING
from forerun.types import AnyArray, Ints


class BufferDims(NamedTuple):
    """The dimensions that all sizes share: width of a page table's row, slots of sequences, heads
    that share a key/value head, tokens of the vocabulary, key/value heads, tokens of a page.
    """

    width: int
    slots: int
    gqa_group: int
    vocab: int
    groups: int
    page_size: int


def changes_of(size: Size, page_size: int) -> int:
    """Return the most entries of page tables sent with a round: as many as its rows' new positions
    may begin, and those of the round before, if its outcome was not read yet.
    """
    return size.rows * (1 + -(-2 * size.nodes // page_size))


def _tiles(size: Size, dims: BufferDims) -> int:
    return size.rows * -(-size.nodes // tile_nodes(size.nodes, dims.gqa_group))


def _shapes(size: Size, dims: BufferDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs, all int32, in the order of their addresses.

    Of rows, [R]:
        where [2,R]     kv_len and position (of the root's output); also under these names
        count (nodes), low and high halves of the seed, temperature (its bits), decided
        draft_slot      slot of the draft model's state of a row; -1 = it does not follow the row
        slot            where the round leaves what the next one needs (FutureState)
        carried         1: begin with the FutureState of `slot`; then the host knows only:
        most, deep, last  most draft tokens and levels, and the last position that a draft token
                          may take
    Of nodes, [R*N]: tokens, parents and depth within the row; tree_intervals [2,R*N]. Of page
    tables (PageTables): sent_to [D,2] the places of entries, 64 bits each, and sent [D] their
    pages. Of attention: split [P,3] (tiles.py). If shaping is needed: RULES of rows; the
    grammars' masks [R*N,ceil(V/32)], and each node's mask, -1 = none.
    """
    of_rows = "count", "low", "high", "temperature", "decided", "draft_slot"
    asked: dict[str, tuple[int, ...]] = {}
    if size.shaping:
        asked |= dict.fromkeys(RULES, (size.rows,))
    if size.masked:
        asked |= {"mask_row": (size.total,), "masks": (size.total, -(-dims.vocab // 32))}
    changes = changes_of(size, dims.page_size)
    return {
        "sent_to": (changes, 2),  # First, because 64 bits are read where 64 bits begin.
        "sent": (changes,),
        "where": (2, size.rows),
        **dict.fromkeys((*of_rows, "slot", "carried", "most", "deep", "last"), (size.rows,)),
        **dict.fromkeys(("tokens", "parents", "depth"), (size.total,)),
        "tree_intervals": (2, size.total),
        "split": (programs_for(_tiles(size, dims), dims.groups), 3),
        **asked,
    }


def room_of(rows: int, nodes: int, dims: BufferDims) -> int:
    """Return the numbers that the inputs of a round take, of `rows` rows and `nodes` nodes in all
    at most.
    """
    largest = Size(rows, -(-nodes // rows), shaping=1, masked=1)
    count = sum(int(np.prod(shape)) for shape in _shapes(largest, dims).values())
    # Other sizes have more tiles, and more changes.
    count += 3 * programs_for(nodes, dims.groups)
    return count + 3 * (2 * rows + -(-2 * nodes // dims.page_size))


class RoundBuffers:
    """The fixed tensors of one size, on the device of `room`, int32[room_of], at its beginning.

    whole, buffers  the inputs
    record  int32[3*R*N + R + 3*R*K + ..] the results, in one copy, see `Record`
    blank   the inputs of a round in which no row has a node, up to the masks, which are not read
            then
    """

    def __init__(self, size: Size, dims: BufferDims, room: Tensor) -> None:
        self.size, self._shapes = size, _shapes(size, dims)
        returned = 3 * size.total + size.rows + 3 * size.rows * size.draft_tokens
        returned += 2 * size.rows * size.candidates
        returned += size.total * (1 + 2 * size.reports) if size.reports else 0
        self.whole = room[: sum(int(np.prod(shape)) for shape in self._shapes.values())]
        self.buffers = self.views(self.whole)
        self.record = torch.zeros(returned, dtype=torch.int32, device=room.device)
        start = np.arange(size.rows + 1, dtype=np.int32) * size.nodes
        self.tile = tile_nodes(size.nodes, dims.gqa_group)
        self.start = torch.from_numpy(start).to(room.device)
        self.tiles = torch.from_numpy(tiles_of(start, self.tile)).to(room.device)
        self.blank = self._blank(dims)

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the parts of inputs int32[.] of this size, by name."""
        parts = whole.split([int(np.prod(shape)) for shape in self._shapes.values()])
        named = zip(self._shapes.items(), parts, strict=True)
        views = {name: part.view(shape) for (name, shape), part in named}
        return views | {"kv_len": views["where"][0], "position": views["where"][1]}

    def _blank(self, dims: BufferDims) -> Ints:
        size, whole = self.size, torch.zeros(len(self.whole), dtype=torch.int32)
        blank = self.views(whole)
        blank["sent_to"].view(torch.int64)[:] = dims.slots * dims.width
        blank["parents"][:] = NOTHING
        blank["draft_slot"][:] = -1
        blank["slot"][:] = dims.slots
        parts = split_of(np.zeros(len(self.tiles), np.int32), len(blank["split"]))
        blank["split"][:] = torch.from_numpy(parts)
        # What stands in their places sees itself alone.
        alone = torch.arange(size.nodes, dtype=torch.int32).repeat(size.rows) + 2 * size.nodes
        blank["tree_intervals"][:] = torch.stack([alone, alone + 1])
        if size.masked:
            blank["mask_row"][:] = -1
            whole = whole[: -blank["masks"].numel()]
        return whole.numpy().copy()


class StagingBuffer:
    """Host buffers to fill a round's inputs: two, used in turn.

    whole, buffers  host copies of RoundBuffers' tensors of these names, in the size of the last
                    reset
    result  receives the round's record
    wait    returns when the last round launched from this buffer has finished
    """

    def __init__(self, room: Tensor) -> None:
        """Allocate a buffer as large as the device's."""
        self._room = torch.zeros(len(room), dtype=torch.int32, pin_memory=room.is_cuda)
        self._views: dict[Size, tuple[Tensor, dict[str, AnyArray], Tensor]] = {}
        self.wait: Callable[[], None] = lambda: None

    def reset(self, fixed: RoundBuffers) -> None:
        """Wait for the round that used it last; then it is filled with a round of this size in
        which no row has a node.
        """
        self.wait()
        if fixed.size not in self._views:
            whole, pinned = self._room[: len(fixed.whole)], self._room.is_pinned()
            buffers = {name: view.numpy() for name, view in fixed.views(whole).items()}
            result = torch.zeros_like(fixed.record, device="cpu", pin_memory=pinned)
            self._views[fixed.size] = whole, buffers, result
        self.whole, self.buffers, self.result = self._views[fixed.size]
        self.whole.numpy()[: len(fixed.blank)] = fixed.blank
        self._tiles = len(fixed.tiles)

    def split(self, lengths: Ints) -> None:
        """Cut the rows' prefixes, int32[n] tokens at most, into attention's parts."""
        each = np.zeros(self._tiles, np.int32).reshape(len(self.buffers["count"]), -1)
        each[: len(lengths)] = lengths[:, None]
        self.buffers["split"][:] = split_of(each.ravel(), len(self.buffers["split"]))


class PageTables:
    """Page tables on the device, by slot: a round gets what has changed since its slots' last
    round.

    A step changes a page or two of a few rows, while whole tables are 8 KB a row of 32k tokens.
    Outdated entries stay: no row reads beyond its own pages. The slow
    twin discards the device's tables before every round, so that each gets its whole tables.
    """

    def __init__(self, slots: int, width: int, rows: int, device: torch.device) -> None:
        """Allocate tables for rounds of at most `rows` rows. The extra last slot is padding."""
        self._table = torch.zeros(slots + 1, width, dtype=torch.int32, device=device)
        self._rows = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # What the device has when all that was begun is over; -1: unknown.
        self._mirror: Ints = np.zeros((slots + 1, width), np.int32)

    def send(self, buffers: dict[str, AnyArray], plan: Plan) -> "partial[None] | None":
        """Write into `buffers` what the device does not have of the plan's tables; where that is
        more than there is room for, returns what writes it there before the round. Rounds begin in
        the order of these calls; where one could not begin, `forget`.
        """
        slots, table = plan.slots, plan.page_table
        width = table.shape[1]
        rows = np.flatnonzero((self._mirror[slots, :width] != table).any(1))
        if not len(rows):
            return None
        new = (self._mirror[slots[rows], :width] != table[rows]) & (table[rows] >= 0)
        row, column = np.nonzero(new)
        pages = table[rows[row], column]
        places = slots[rows[row]].astype(np.int64) * self._mirror.shape[1] + column
        self._mirror[slots[rows], :width] = table[rows]
        if len(places) <= len(buffers["sent"]):
            buffers["sent_to"].view(np.int64)[: len(places), 0] = places
            buffers["sent"][: len(places)] = pages
            return None
        return partial(self.write, torch.from_numpy(places), torch.from_numpy(pages))

    def forget(self) -> None:
        """Mark the device's tables as unknown, so that the next `send` writes them whole."""
        self._mirror.fill(-1)

    def of(self, size: Size, inputs: dict[str, Tensor]) -> Tensor:
        """Return int32[R,W], the tables of a round's rows with the entries sent with it. Launches
        only.
        """
        self.write(inputs["sent_to"].view(torch.int64)[:, 0], inputs["sent"])
        return torch.index_select(self._table, 0, inputs["slot"], out=self._rows[: size.rows])

    def write(self, places: Tensor, pages: Tensor) -> None:
        """Put pages int32[n] into entries int64[n] of the tables, one behind another."""
        device = self._table.device
        self._table.view(-1).scatter_(0, places.to(device), pages.to(device))
