"""A step in flight: what its programs are asked for, and how their records are read."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from forerun.executors.host_choice import reports_of
from forerun.executors.host_sampler import HostSampler
from forerun.executors.jax.batches import Batch
from forerun.executors.jax.draft_passes import FEW
from forerun.executors.jax.drafted import Drafted
from forerun.executors.jax.inputs import Rows
from forerun.executors.jax.programs import Programs
from forerun.executors.jax.reports import TOP, is_told, line_size, report
from forerun.executors.jax.shaping import Asked, edits_of
from forerun.interface.plan import Plan, Reports
from forerun.speculative.draft_tree import full_size
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import TreeBatch
from forerun.types import Bools, Floats, Ints


@dataclass(slots=True)
class Scores:
    """A step in flight. Of a carried one `batches` and `place` are known when it has been read.

    slots    int32[B] of its rows
    carries  whether programs decide all of it, and nothing else is to be read of it
    batches  its dispatches
    records  what each gives that has begun, on the device; None of a chunk
    place    int32[M] a flat node's row of State.hidden; -1 = it did not run
    rows     what is asked of its rows; `decided`: whose path the programs find
    asked    the parameters of rows that need more than a plain round
    drafted  what they draft
    told     lines of flat nodes (reports.py)
    """

    slots: Ints
    carries: bool
    batches: list[Batch]
    records: list[Any]
    place: Ints
    rows: Rows
    asked: Asked
    drafted: Drafted | None
    told: dict[int, Ints] = field(default_factory=dict)


def asked_of(plan: Plan, sampler: HostSampler, room: int) -> Asked:
    """By row: the parameters of those that a plain round does not decide. The host decides rows
    that change more than `room` logits.
    """
    found: Asked = {}
    more = (sampler.choosing.temperature[plan.slots] < 0) | plan.constrained
    more |= sampler.reports(plan.slots)
    for row in np.flatnonzero(plan.samples & more).tolist():
        slot = sampler.of_row(plan, row)
        if slot.sampling.plain and not plan.constrained[row] and not is_told(slot.sampling):
            continue
        edits = edits_of(slot.sampling, slot.history)
        if len(edits) <= room:
            found[row] = slot.sampling, edits
    return found


def certain(plan: Plan, sampler: HostSampler) -> bool:
    """Whether a program's choices for all rows need no look of the host: neither at their text, nor
    at logits, nor at a grammar.
    """
    samplings = [sampler.of_row(plan, row).sampling for row in range(plan.rows)]
    return not plan.constrained.any() and all(map(_certain, samplings))


def _certain(sampling: Sampling) -> bool:
    penalties = sampling.frequency_penalty or sampling.presence_penalty
    cut = sampling.temperature > 0 and sampling.top_p < 1.0
    told = sampling.logprobs is None or is_told(sampling)
    return not (penalties or sampling.repetition_penalty != 1.0 or cut or sampling.lossy) and told


def ran(scores: Scores) -> TreeBatch:
    """What a carried step ran, of which its only record tells; waits for it."""
    batch, rows = scores.batches[0], len(scores.slots)
    scores.records[0] = record = jax.device_get(scores.records[0])
    tokens, parents, real = record[-3 * batch.size.total :].reshape(3, *batch.size)[:, :rows]
    row, node = np.nonzero(real)
    counts = real.sum(1).astype(np.int32)
    start = np.append(0, np.cumsum(counts)).astype(np.int32)
    above = parents[row, node]
    depth = np.zeros(real.shape, np.int32)
    for place in range(1, batch.size.nodes):
        depth[:, place] = depth[np.arange(rows), np.maximum(parents[:, place], 0)] + 1
    flat = np.split(np.arange(len(row), dtype=np.int32), start[1:-1])
    scores.batches[0] = replace(batch, nodes=tuple(flat))
    scores.place = (row * batch.size.nodes + node).astype(np.int32)
    parents = np.where(above < 0, -1, above + start[row]).astype(np.int32)
    known = np.ones(rows, np.int32)
    return TreeBatch(tokens[row, node], parents, start, known, depth[row, node])


def asked_rows(plan: Plan, decided: Bools, drafted: Drafted | None = None) -> Rows:
    """What a step's programs do for its rows."""
    follows = np.zeros(plan.rows, np.bool_) if drafted is None else drafted.rows
    cold = np.zeros(plan.rows, np.float32)
    return Rows(decided, np.where(follows, plan.slots, -1).astype(np.int32), cold)


def receive(record: Any, batch: Batch, choice: Ints, scores: Scores, vocab: int) -> None:
    """Put what a round gave where it belongs; waits for it."""
    found, end = jax.device_get(record), batch.size.total
    _spread(choice, batch, found[:end])
    if not scores.asked.keys().isdisjoint(batch.rows):
        begin, end = end, end + batch.size.total * line_size(vocab)
        _tell(batch, found[begin:end].reshape(*batch.size, -1), choice, scores)
    if scores.drafted is not None:
        drafted = scores.drafted
        count = 3 * batch.size.rows * full_size(drafted.width, drafted.levels)
        drafted.fill(batch, found[end : end + count])


def _tell(batch: Batch, lines: Ints, choice: Ints, scores: Scores) -> None:
    """Keep the lines of what was chosen, in rows that are told."""
    for row, nodes, line in zip(batch.rows, batch.nodes, lines, strict=False):
        if row in scores.asked and is_told(scores.asked[row][0]):
            kept = choice[nodes] >= 0
            scores.told.update(zip(nodes[kept].tolist(), line[: len(nodes)][kept], strict=True))


def _spread(choice: Ints, batch: Batch, record: Ints) -> None:
    """Write a record's choices to their flat nodes, where it has any."""
    for nodes, line in zip(batch.nodes, record.reshape(batch.size), strict=False):
        found = line[: len(nodes)]
        choice[nodes] = np.where(found >= 0, found, choice[nodes])


class Answers:
    """What the host asks of a step that has ended; each a dispatch and a copy, where it is needed
    at all. there: no other step has begun since; after one only rows without finite logits ask.
    """

    def __init__(self, programs: Programs, scores: Scores, vocab: int, there: bool = True) -> None:
        self._programs, self._scores, self._vocab = programs, scores, vocab
        self._there = there
        self._logits: dict[int, Floats] = {}

    def of_node(self, node: int) -> Floats:
        """Logits of a flat node, and a few more than were asked for; NaN where it did not run."""
        place = self._scores.place
        if place[node] < 0 or not self._there:
            return np.full(self._vocab, np.nan, np.float32)
        if node not in self._logits:
            last = min(node + FEW, len(place))
            nodes = [other for other in range(node, last) if other not in self._logits]
            rows = self._programs.logits(place[nodes])
            self._logits.update(zip(nodes, rows, strict=True))
        return self._logits[node]

    def reports(self, top: int, pairs: list[tuple[int, int]]) -> Reports:
        """As ReportsOf; what came with a round's record is asked for no more."""
        if top > TOP or not pairs:
            return reports_of(self.of_node, top, pairs)
        told = self._scores.told
        if any(node not in told for node, _ in pairs):
            nodes, tokens = np.array(pairs, np.int32).T
            found = self._programs.lines(self._scores.place[nodes], tokens)
            told.update(zip(nodes.tolist(), found, strict=True))
        return tuple(report(told[node], token, top) for node, token in pairs)
