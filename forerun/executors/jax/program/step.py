"""A round on XLA: the calls of its programs, and the reading of their records."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from forerun.executors.host_choice import history_of, report_in, reports_of
from forerun.executors.host_sampler import HostSampler
from forerun.executors.jax.drafts.draft_passes import FEW
from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.program.programs import JaxPrograms
from forerun.executors.jax.rounds.batches import Batch
from forerun.executors.jax.rounds.inputs import Rows
from forerun.executors.jax.rounds.reports import TOP, line_size, reports_logprobs
from forerun.executors.jax.rounds.shaping import EditsByRow, edits_of
from forerun.interface.next_draft import NextDrafts
from forerun.interface.plan import Outcome, Plan, Reports, Round
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import full_size, unpadded
from forerun.types import AnyArray, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step's drafts for the next step, completed as its records arrive: see NextDrafts.

    sizes      of the network
    confident  of width 0 if it has no confidence
    """

    rows: Bools
    width: int
    levels: int
    sizes: NetworkSizes
    tokens: Ints
    parents: Ints
    value: Ints
    confident: Ints

    @classmethod
    def of(cls, rows: Bools, width: int, levels: int, sizes: NetworkSizes) -> "Drafted":
        """Return arrays int32[B,K], all zero until `fill`, for the trees of the rows in bool[B]; K
        = full_size(width, levels).
        """
        count = full_size(width, levels)
        widths = count, count, count, sizes.confident * (1 + count)
        made = (np.zeros((len(rows), each), np.int32) for each in widths)
        return cls(rows, width, levels, sizes, *made)

    def fill(self, batch: Batch, grown: Ints) -> None:
        """Copy the trees of a batch's rows from its record (drafting.py)."""
        rows, parts = batch.size.rows, (self.tokens, self.parents, self.value, self.confident)
        begin = 0
        for into in parts:
            count = rows * into.shape[1]
            found = grown[begin : begin + count].reshape(rows, -1)
            into[list(batch.rows)] = found[: len(batch.rows)]
            begin += count

    def joined(self, made: Bools) -> NextDrafts:
        """Return the finished NextDrafts, for those of its rows that are also in made bool[B]: rows
        that were decided in the step.
        """
        return NextDrafts(
            self.rows & made,
            self.width,
            self.levels,
            self.tokens,
            self.parents,
            self.value.view(np.float32),
            confident=self.confident.view(np.float32) if self.sizes.confident else None,
        )


@dataclass(eq=False)
class JaxRound(Round):
    """A running step. `batches` and `place` of one that began from another are known only once it
    has been read.

    batches  its dispatches
    records  the result of each that has begun, on the device; None for a chunk
    place    int32[M] a flat node's row of State.hidden; -1 = it did not run
    rows     the programs' work for its rows; `decided`: rows that programs decide
    tables   int32[B,K,W] page tables of its rows (inputs.py)
    edits    sampling parameters of rows that need a `shaped` round
    drafted  its drafts
    reported lines of flat nodes (reports.py) reserved rows of recurrent states by slot, for copies
    """

    batches: list[Batch] = field(kw_only=True)
    records: list[Any] = field(default_factory=list)
    place: Ints = field(kw_only=True)
    rows: Rows = field(kw_only=True)
    tables: Ints = field(kw_only=True)
    edits: EditsByRow = field(kw_only=True)
    drafted: Drafted | None = field(kw_only=True)
    reported: dict[int, Ints] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)


def edits_by_row(plan: Plan, sampler: HostSampler, room: int) -> EditsByRow:
    """Return, by row, sampling parameters and edits of the rows that have more parameters than
    temperature and that a round can decide. The host decides rows with accept thresholds, with more
    than `room` edits, or with more reported alternatives than a program computes.
    """
    found: EditsByRow = {}
    more = ~sampler.choosing.on_device[plan.slots] | plan.constrained
    more |= sampler.reports(plan.slots)
    for row in np.flatnonzero(plan.samples & more).tolist():
        slot = sampler.of_row(plan, row)
        shaped = (
            not slot.sampling.temperature_only
            or plan.constrained[row]
            or reports_logprobs(slot.sampling)
        )
        if slot.sampling.lossy or not shaped:
            continue
        edits = edits_of(slot.sampling, history_of(slot))
        if len(edits) <= room:
            found[row] = slot.sampling, edits
    return found


def certain(plan: Plan, sampler: HostSampler) -> bool:
    """Return whether the programs' choices for all rows are final without the host: no grammar,
    penalty, top_p or threshold, and not too many reported alternatives. Only then may the next
    round begin from this one.
    """
    samplings = [sampler.of_row(plan, row).sampling for row in range(plan.rows)]
    return not plan.constrained.any() and all(map(_certain, samplings))


def _certain(sampling: Sampling) -> bool:
    cut = sampling.temperature > 0 and sampling.top_p < 1.0
    reportable = sampling.logprobs is None or reports_logprobs(sampling)
    return not (sampling.penalised or cut or sampling.lossy) and reportable


def complete(round: JaxRound) -> None:
    """Complete plan, batch and trees of a round that continued from another, from its record; waits
    for it. Changes `round`. Raises EngineError if the previous round is not finished.
    """
    batch, rows = round.batches[0], round.plan.rows
    round.records[0] = record = jax.device_get(round.records[0])
    round.complete_plan()
    tokens, parents, real = record[-3 * batch.size.total :].reshape(3, *batch.size)[:, :rows]
    round.trees, round.place = unpadded(tokens, parents, real.sum(1))
    nodes = np.arange(len(round.place), dtype=np.int32)
    round.batches[0] = replace(batch, nodes=tuple(np.split(nodes, round.trees.start[1:-1])))


def left_to_move(
    round: JaxRound, outcome: Outcome, scratch: AnyArray, page_size: int
) -> tuple[Ints, Ints]:
    """Return int[K,n] each, slots in scratch (from `scratch` int[K,1] on) and slots in pages, by
    page table, of nodes that the host accepted in rows that no program decided.
    """
    plan, trees = round.plan, round.trees
    source, target = [scratch[:, :0]], [scratch[:, :0]]
    for row in np.flatnonzero(plan.samples & ~round.rows.decided).tolist():
        path = outcome.permanent(trees, row)
        path = path[path >= trees.root(row)]
        positions = plan.kv_len[row] + trees.depth[path]
        source.append(scratch + round.place[path])
        pages = round.tables[row][:, positions // page_size]
        target.append(pages * page_size + positions % page_size)
    return np.concatenate(source, 1), np.concatenate(target, 1)


def asked_rows(plan: Plan, decided: Bools, drafted: Drafted | None = None) -> Rows:
    """Return the programs' work for the plan's rows: which they decide (bool[B]) and which the
    draft model follows. Temperatures are 0 until they are set.
    """
    follows = np.zeros(plan.rows, np.bool_) if drafted is None else drafted.rows
    cold = np.zeros(plan.rows, np.float32)
    none = np.full(plan.rows, -1, np.int32)
    return Rows(decided, np.where(follows, plan.slots, -1).astype(np.int32), cold, none)


def receive(record: Any, batch: Batch, choice: Ints, round: JaxRound, vocab: int) -> None:
    """Wait for a round's record and store its parts: choices in choice int32[M] of flat nodes,
    reported lines in `round.reported`, trees in `round.drafted`.
    """
    found, end = jax.device_get(record), batch.size.total
    _spread(choice, batch, found[:end])
    if not round.edits.keys().isdisjoint(batch.rows):
        begin, end = end, end + batch.size.total * line_size(vocab)
        _store_lines(batch, found[begin:end].reshape(*batch.size, -1), choice, round)
    if round.drafted is not None:
        drafted = round.drafted
        count = drafted.sizes.record(batch.size.rows, drafted.width, drafted.levels)
        drafted.fill(batch, found[end : end + count])


def _store_lines(batch: Batch, lines: Ints, choice: Ints, round: JaxRound) -> None:
    """Store the lines of chosen tokens, for rows that report log-probabilities."""
    for row, nodes, line in zip(batch.rows, batch.nodes, lines, strict=False):
        if row in round.edits and reports_logprobs(round.edits[row][0]):
            kept = choice[nodes] >= 0
            round.reported.update(zip(nodes[kept].tolist(), line[: len(nodes)][kept], strict=True))


def _spread(choice: Ints, batch: Batch, record: Ints) -> None:
    """Write a record's choices to their flat nodes, if it has any."""
    for nodes, line in zip(batch.nodes, record.reshape(batch.size), strict=False):
        found = line[: len(nodes)]
        choice[nodes] = np.where(found >= 0, found, choice[nodes])


class Answers:
    """Further results of a finished step for the host, each computed on demand with a dispatch and
    a copy. there: whether no other step has begun since; after one only rows without finite logits
    need any.
    """

    def __init__(
        self, programs: JaxPrograms, round: JaxRound, vocab: int, there: bool = True
    ) -> None:
        self._programs, self._round, self._vocab = programs, round, vocab
        self._there = there
        self._logits: dict[int, Floats] = {}

    def of_node(self, node: int) -> Floats:
        """Return float32[V] raw logits of a flat node, fetched with a few of the next ones and
        cached; all NaN if it did not run, or if a later step has overwritten it.
        """
        place = self._round.place
        if place[node] < 0 or not self._there:
            return np.full(self._vocab, np.nan, np.float32)
        if node not in self._logits:
            last = min(node + FEW, len(place))
            nodes = [other for other in range(node, last) if other not in self._logits]
            rows = self._programs.logits(place[nodes])
            self._logits.update(zip(nodes, rows, strict=True))
        return self._logits[node]

    def reports(self, top: int, pairs: list[tuple[int, int]]) -> Reports:
        """Return the log-probabilities of (flat node, token) pairs with `top` alternatives each, as
        host_choice.ReportsOf; those that came with the record are not fetched again.
        """
        if top > TOP or not pairs:
            return reports_of(self.of_node, top, pairs)
        reported = self._round.reported
        if any(node not in reported for node, _ in pairs):
            nodes, tokens = np.array(pairs, np.int32).T
            found = self._programs.lines(self._round.place[nodes], tokens)
            reported.update(zip(nodes.tolist(), found, strict=True))
        return tuple(report_in(reported[node], token, top) for node, token in pairs)
