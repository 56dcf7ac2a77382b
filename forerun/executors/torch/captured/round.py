"""The host's half of a captured round: its input buffers (fixed.py), the translation of a plan to
them, and the reading of its record.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.device_choice import Choosing, DeviceNodes
from forerun.executors.host_choice import report_in
from forerun.executors.torch.attention.geometry import tree_intervals
from forerun.executors.torch.captured.fixed import SENT, RoundBuffers
from forerun.executors.torch.sizes import Record, Size, split_of
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Plan, Round, TokenLogprobs
from forerun.speculative.tree import TreeBatch, unpadded
from forerun.types import AnyArray, Bools, Ints

Reserved = dict[int, int]
"""Slot -> the row of recurrent states that a round may copy its state to."""


@dataclass(eq=False)
class CapturedRound(Round):
    """One replay, running or finished.

    decided  bool[B]  rows whose accepted path the device commits
    result   receives the record; another round may reuse it once this record has been read
    wait     returns when the record has arrived
    begun    perf_counter of its launch
    reserved rows of states; empty without recurrent layers
    place    int32[M] a flat node's number in scratch, logits and features; for a round that began
             from another known only once the round has finished
    record   the results, once read
    """

    size: Size = field(kw_only=True)
    decided: Bools = field(kw_only=True)
    result: Tensor = field(kw_only=True)
    wait: Callable[[], None] = field(kw_only=True)
    begun: float = field(kw_only=True)
    reserved: Reserved = field(kw_only=True)
    place: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    record: Record = field(init=False)

    def read(self) -> None:
        """Wait for the record, and complete plan, trees and place. Call once."""
        self.wait()
        self.record = record = Record.of(self.size, self.result.numpy().copy())
        if self.previous is not None:
            self.complete_plan()
            shape, rows = (self.size.rows, self.size.nodes), self.plan.rows
            tokens, parents = record.tokens.reshape(shape), record.parents.reshape(shape)
            self.trees, self.place = unpadded(tokens[:rows], parents[:rows], record.count[:rows])

    def report(self, node: int, top: int) -> TokenLogprobs | None:
        """Return the log-probabilities of the choice at a flat node; None if the device did not
        decide it, or computed fewer alternatives than `top`.
        """
        size, record = self.size, self.record
        place = int(self.place[node])
        if record.choices[place] < 0 or not 0 <= top <= size.reports or not size.reports:
            return None
        line = record.reported.reshape(size.total, -1)[place]
        return report_in(line, int(record.choices[place]), top)

    def drafts(self) -> NextDrafts | None:
        """Return the drafts for the next step; None if none were requested."""
        size, rows = self.size, self.plan.rows
        if not size.levels:
            return None
        ids = log_probs = None
        if size.masked:
            ids, log_probs = self.record.candidates.reshape(2, size.rows, -1)[:, :rows].copy()
            log_probs = log_probs.view(np.float32)
        grown = self.record.grown.reshape(3, size.rows, size.draft_tokens)
        tokens, parents, value = grown[:, :rows].copy()
        confident = self.record.confident.reshape(size.rows, -1)[:rows]
        return NextDrafts(
            rows=np.isin(self.plan.slots, self.drafting),
            width=size.width,
            levels=size.levels,
            tokens=tokens,
            parents=parents,
            value=value.view(np.float32),
            ids=ids,
            log_probs=log_probs,
            confident=confident.view(np.float32) if confident.size else None,
        )


Buffers = dict[str, AnyArray]
"""See fixed.py; reset to blank before they are filled."""


def prepare_inputs(
    buffers: Buffers, size: Size, plan: Plan, trees: TreeBatch, nodes: DeviceNodes
) -> tuple[Ints, Bools]:
    """Write the inputs of a step that the host knows completely. Returns the place of every flat
    node, and bool[B] which rows the device decides.
    """
    count = plan.rows
    row = np.repeat(np.arange(count), np.diff(trees.start))
    place = row * size.nodes + np.arange(len(row)) - trees.start[row]
    decided = np.isin(trees.start[:-1], nodes.nodes)
    buffers["kv_len"][:count] = plan.kv_len
    buffers["count"][:count] = np.diff(trees.start)
    buffers["decided"][:count] = decided
    roots = np.searchsorted(nodes.nodes, trees.start[:-1][decided])
    chosen = np.flatnonzero(decided)
    _put_choosing(buffers, chosen, nodes.seeds[roots], nodes.temperatures[roots])
    buffers["position"][chosen] = nodes.positions[roots]
    buffers["tokens"][place] = trees.tokens
    buffers["parents"][place] = np.where(trees.parents < 0, -1, trees.parents - trees.start[row])
    buffers["depth"][place] = trees.depth
    buffers["tree_intervals"][:, place] = tree_intervals(trees)
    return place.astype(np.int32), decided


def prepare_inputs_carried(
    buffers: Buffers, size: Size, plan: Plan, ends: Ints, choosing: Choosing, most: AnyArray
) -> None:
    """Write the inputs of a step given to `Executor.begin_after`: bounds, and the constants of each
    sequence. most: int[B] draft tokens. Nodes get the values of a chain of any length; the device
    replaces them for trees.
    """
    rows, places = np.arange(plan.rows), np.arange(size.nodes)
    buffers["carried"][rows] = buffers["decided"][rows] = buffers["count"][rows] = 1
    buffers["most"][rows], buffers["deep"][rows] = most, plan.max_depth
    buffers["last"][rows] = ends - 1
    _put_choosing(buffers, rows, choosing.seed[plan.slots], choosing.temperature[plan.slots])
    buffers["parents"].reshape(-1, size.nodes)[rows] = places - 1
    buffers["tree_intervals"].reshape(2, -1, size.nodes)[0, rows] = places
    buffers["tree_intervals"].reshape(2, -1, size.nodes)[1, rows] = 1


def check_pages(plan: Plan, last: AnyArray, page_size: int) -> None:
    """Raise EngineError if the last position int[B] that a row can reach has no page."""
    page = last // page_size
    inside = page < plan.page_table.shape[1]
    if not inside.all() or (plan.page_table[np.arange(plan.rows), page] < 0).any():
        raise EngineError("a plan's position has no page: the page table is too short")


def _put_choosing(
    buffers: Buffers, rows: AnyArray, seeds: AnyArray, temperatures: AnyArray
) -> None:
    """Write the sampling state of these rows: seeds uint64, temperatures float32."""
    buffers["low"][rows] = (seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    buffers["high"][rows] = (seeds >> 32).astype(np.uint32).view(np.int32)
    buffers["temperature"].view(np.float32)[rows] = temperatures


class StagingBuffer:
    """Host buffers for a round's inputs; there are two, used in turn.

    flat, buffers  host copies of RoundBuffers' tensors of these names, in the size of the last
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
        """Wait for the round that used this buffer last, then fill it with a round of this size in
        which no row has a node.
        """
        self.wait()
        if fixed.size not in self._views:
            flat, pinned = self._room[: len(fixed.flat)], self._room.is_pinned()
            buffers = {name: view.numpy() for name, view in fixed.views(flat).items()}
            result = torch.zeros_like(fixed.record, device="cpu", pin_memory=pinned)
            self._views[fixed.size] = flat, buffers, result
        self.flat, self.buffers, self.result = self._views[fixed.size]
        self.flat.numpy()[: len(fixed.blank)] = fixed.blank
        self._tiles = len(fixed.tiles)

    def split(self, lengths: Ints) -> None:
        """Divide the rows' prefixes, of at most int32[n] tokens, into parts for attention."""
        each = np.zeros(self._tiles, np.int32).reshape(len(self.buffers["count"]), -1)
        each[: len(lengths)] = lengths[:, None]
        self.buffers["split"][:] = split_of(each.ravel(), len(self.buffers["split"]))


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Entries of a table on the device: pages int32[n] at indices int64[n]."""

    table: "PageTables"
    places: Tensor
    pages: Tensor

    def __call__(self) -> None:
        """Write the entries."""
        self.table.write(self.places, self.pages)


class PageTables:
    """Page tables on the device, by slot: a round gets the changes since its slots' last round. A
    step changes a page or two of a few rows, while whole tables are 8 KB per row of 32k tokens.
    Outdated entries stay: no row reads beyond its own pages. A test variant discards the device's
    tables before every round, so that each gets its whole tables.
    """

    def __init__(
        self, slots: int, width: int, rows: int, device: torch.device, sent: str = SENT[0]
    ) -> None:
        """Allocate tables for rounds of at most `rows` rows. The extra last slot is padding. sent:
        name of the input that changes arrive in.
        """
        self._sent = sent
        self._table = torch.zeros(slots + 1, width, dtype=torch.int32, device=device)
        self._rows = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # The device's tables after all launched rounds; -1: unknown.
        self._mirror: Ints = np.zeros((slots + 1, width), np.int32)

    def send(
        self, buffers: dict[str, AnyArray], slots: Ints, table: Ints
    ) -> tuple[TableEntries, ...]:
        """Write the changes of the tables int32[B,W] of slots int32[B] to `buffers`; returns those
        for which there is no room, to be written before the round. Rounds must begin in the order
        of these calls; if one could not begin, call `forget`.
        """
        width = table.shape[1]
        rows = np.flatnonzero((self._mirror[slots, :width] != table).any(1))
        if not len(rows):
            return ()
        new = (self._mirror[slots[rows], :width] != table[rows]) & (table[rows] >= 0)
        row, column = np.nonzero(new)
        pages = table[rows[row], column]
        places = slots[rows[row]].astype(np.int64) * self._mirror.shape[1] + column
        self._mirror[slots[rows], :width] = table[rows]
        if len(places) <= len(buffers[self._sent]):
            buffers[f"{self._sent}_to"].view(np.int64)[: len(places), 0] = places
            buffers[self._sent][: len(places)] = pages
            return ()
        return (TableEntries(self, torch.from_numpy(places), torch.from_numpy(pages)),)

    def forget(self) -> None:
        """Mark the device's tables as unknown, so that the next `send` writes them whole."""
        self._mirror.fill(-1)

    def of(self, size: Size, inputs: dict[str, Tensor]) -> Tensor:
        """Return int32[R,W], the tables of a round's rows updated with the entries sent with it.
        Does not synchronise with the device.
        """
        self.write(inputs[f"{self._sent}_to"].view(torch.int64)[:, 0], inputs[self._sent])
        rows = self._rows[: size.rows]
        return torch.index_select(self._table, 0, inputs["slot"], out=rows)

    def write(self, places: Tensor, pages: Tensor) -> None:
        """Write pages int32[n] to entries int64[n] of the flattened tables."""
        device = self._table.device
        self._table.view(-1).scatter_(0, places.to(device), pages.to(device))
