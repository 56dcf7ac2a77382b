"""The host's half of a captured round, in NumPy: what a plan writes into its inputs, and what is
read of its record when it is over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import Tensor

from forerun.errors import EngineError
from forerun.executors.device_choice import Choosing, DeviceNodes
from forerun.executors.torch.triton.record import Record, Size
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Plan, Round, TokenLogprobs
from forerun.speculative.tree import TreeBatch, batch
from forerun.speculative.verify import intervals
from forerun.types import AnyArray, Bools, Ints


@dataclass(eq=False)
class CapturedRound(Round):
    """One replay, running or finished.

    decided  bool[B]  rows whose accepted path the device commits
    result   receives the record; another round may reuse it once this record has been read
    wait     returns when the record has arrived
    begun    perf_counter of its launch
    place    int32[M] a flat node's number in scratch, logits and features; for a round that began
             from another it is known once the round has finished
    record   the results, once read
    """

    size: Size = field(kw_only=True)
    decided: Bools = field(kw_only=True)
    result: Tensor = field(kw_only=True)
    wait: Callable[[], None] = field(kw_only=True)
    begun: float = field(kw_only=True)
    place: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    record: Record = field(init=False)

    def read(self) -> None:
        """Wait for the record, and complete plan, trees and place. Once."""
        self.wait()
        self.record = Record.of(self.size, self.result.numpy().copy())
        if self.previous is not None:
            self.complete_plan()
            self._read_trees()

    def report(self, node: int, top: int) -> TokenLogprobs | None:
        """Return the log-probabilities of the choice at a flat node; None if the device did not
        decide it, or reports fewer.
        """
        size, record = self.size, self.record
        place = int(self.place[node])
        if record.choices[place] < 0 or not 0 <= top <= size.reports or not size.reports:
            return None
        mine = record.reported.reshape(size.total, -1)[place]
        own, ids, others = mine[:1], mine[1 : 1 + size.reports], mine[1 + size.reports :]
        best = zip(ids.tolist(), others.view(np.float32).tolist(), strict=True)
        return TokenLogprobs(
            token=int(record.choices[place]),
            logprob=float(own.view(np.float32)[0]),
            top=tuple(pair for pair in best if pair[1] > -np.inf)[:top],
        )

    def drafts(self) -> NextDrafts | None:
        """Return what was drafted for the next step; None without a request."""
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

    def _read_trees(self) -> None:
        """Complete trees and place of a round that went on from another."""
        rows, nodes, record = self.plan.rows, self.size.nodes, self.record
        if nodes == 1:
            self.place = np.arange(rows, dtype=np.int32)
            self.trees = batch(record.tokens[:rows, None])
            return
        counts = record.count[:rows]
        row, node = np.nonzero(np.arange(nodes) < counts[:, None])
        self.place = place = (row * nodes + node).astype(np.int32)
        start = np.append(0, np.cumsum(counts)).astype(np.int32)
        parents = np.where(node > 0, record.parents[place] + start[row], -1).astype(np.int32)
        depth = np.zeros(len(place), np.int32)
        for _ in range(int(counts.max()) - 1):  # A level each, at least.
            deeper = np.where(parents >= 0, depth[parents] + 1, 0)
            if (deeper == depth).all():
                break
            depth = deeper.astype(np.int32)
        known = np.ones(rows, np.int32)
        self.trees = TreeBatch(record.tokens[place], parents, start, known, depth)


Buffers = dict[str, AnyArray]
"""See fixed.py; blank before anything is written."""


def prepare_inputs(
    buffers: Buffers, size: Size, plan: Plan, trees: TreeBatch, nodes: DeviceNodes
) -> tuple[Ints, Bools]:
    """Write a step of which the host knows everything. Returns the place of every flat node, and
    bool[B] which rows the device decides.
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
    buffers["tree_intervals"][:, place] = tree_intervals(trees, row)
    return place.astype(np.int32), decided


def prepare_inputs_carried(
    buffers: Buffers, size: Size, plan: Plan, ends: Ints, choosing: Choosing, most: AnyArray
) -> None:
    """Write what `Executor.begin_after` is given: bounds, and what a sequence never changes.
    most int[B] draft tokens.

    Of nodes, what stands there in a chain of any length; of trees the device knows better.
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


def tree_intervals(trees: TreeBatch, row: AnyArray) -> AnyArray:
    """Return int32[2,M], enter and leave (geometry.py) of every flat node; row int[M] its row."""
    counts = np.diff(trees.start)
    if np.array_equal(trees.parents[trees.depth > 0], np.flatnonzero(trees.depth > 0) - 1):
        return np.stack([trees.depth, counts[row]])
    spans = [
        intervals(trees.parents[begin:end] - begin) for begin, end in pairwise(trees.start.tolist())
    ]
    return np.concatenate(spans, axis=1)
