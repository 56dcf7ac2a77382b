"""The host's half of a captured round's inputs: what a step fills and sends (fixed.py)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.executors.torch.attention.tiles import split_of
from forerun.executors.torch.captured.fixed import RoundBuffers
from forerun.executors.torch.triton.record import Size
from forerun.interface.plan import Plan
from forerun.types import AnyArray, Ints


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


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Entries of a table on the device: pages int32[n] at places int64[n]."""

    table: "PageTables"
    places: Tensor
    pages: Tensor

    def __call__(self) -> None:
        """Write them."""
        self.table.write(self.places, self.pages)


class PageTables:
    """Page tables on the device, by slot: a round gets what has changed since its slots' last
    round.

    A step changes a page or two of a few rows, while whole tables are 8 KB a row of 32k tokens.
    Outdated entries stay: no row reads beyond its own pages. The slow
    twin discards the device's tables before every round, so that each gets its whole tables.
    """

    sent: tuple[str, ...] = ("sent",)
    """The names of what is sent of them, the first by the class itself."""

    def __init__(self, slots: int, width: int, rows: int, device: torch.device) -> None:
        """Allocate tables for rounds of at most `rows` rows. The extra last slot is padding."""
        self._table = torch.zeros(slots + 1, width, dtype=torch.int32, device=device)
        self._rows = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # What the device has when all that was begun is over; -1: unknown.
        self._mirror: Ints = np.zeros((slots + 1, width), np.int32)

    @property
    def kinds(self) -> tuple["PageTables", ...]:
        """All that `send` sends, this one first."""
        return (self,)

    def send(self, buffers: dict[str, AnyArray], plan: Plan) -> tuple[TableEntries, ...]:
        """Write into `buffers` what the device does not have of the plan's tables; returns what is
        more than there is room for, to be written before the round. Rounds begin in the order of
        these calls; where one could not begin, `forget`.
        """
        slots, table = plan.slots, plan.page_table
        width = table.shape[1]
        rows = np.flatnonzero((self._mirror[slots, :width] != table).any(1))
        if not len(rows):
            return ()
        new = (self._mirror[slots[rows], :width] != table[rows]) & (table[rows] >= 0)
        row, column = np.nonzero(new)
        pages = table[rows[row], column]
        places = slots[rows[row]].astype(np.int64) * self._mirror.shape[1] + column
        self._mirror[slots[rows], :width] = table[rows]
        if len(places) <= len(buffers[self.sent[0]]):
            buffers[f"{self.sent[0]}_to"].view(np.int64)[: len(places), 0] = places
            buffers[self.sent[0]][: len(places)] = pages
            return ()
        return (TableEntries(self, torch.from_numpy(places), torch.from_numpy(pages)),)

    def forget(self) -> None:
        """Mark the device's tables as unknown, so that the next `send` writes them whole."""
        self._mirror.fill(-1)

    def of(self, size: Size, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `table` int32[R,W], the tables of a round's rows with the entries sent with it.
        Launches only.
        """
        self.write(inputs[f"{self.sent[0]}_to"].view(torch.int64)[:, 0], inputs[self.sent[0]])
        rows = self._rows[: size.rows]
        return {"table": torch.index_select(self._table, 0, inputs["slot"], out=rows)}

    def write(self, places: Tensor, pages: Tensor) -> None:
        """Put pages int32[n] into entries int64[n] of the tables, one behind another."""
        device = self._table.device
        self._table.view(-1).scatter_(0, places.to(device), pages.to(device))
