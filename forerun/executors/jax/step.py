"""A step in flight: what its programs are asked for, and how their records are read."""

from dataclasses import dataclass, field
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
from forerun.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Scores:
    """A step in flight.

    batches  its dispatches
    records  what each gives that has begun, on the device; None of a chunk
    place    int32[M] a flat node's row of State.hidden; -1 = it did not run
    rows     what is asked of its rows; `decided`: whose path the programs find
    asked    the parameters of rows that need more than a plain round
    drafted  what they draft
    told     lines of flat nodes (reports.py)
    """

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
        scores.drafted.fill(batch, found[end:])


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
    at all.
    """

    def __init__(self, programs: Programs, scores: Scores, vocab: int) -> None:
        self._programs, self._scores, self._vocab = programs, scores, vocab
        self._logits: dict[int, Floats] = {}

    def of_node(self, node: int) -> Floats:
        """Logits of a flat node, and a few more than were asked for; NaN where it did not run."""
        place = self._scores.place
        if place[node] < 0:
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
