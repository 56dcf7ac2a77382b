"""A step in flight: what its programs are asked for, and how their records are read."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from forerun.executors.jax.batches import Batch
from forerun.executors.jax.drafted import Drafted
from forerun.executors.jax.functions import Key
from forerun.executors.jax.inputs import Rows
from forerun.interface.next_draft import DraftRequest
from forerun.interface.plan import Plan
from forerun.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class Scores:
    """A step in flight.

    batches  its dispatches
    records  what each gives, on the device; None of a chunk
    place    int32[M] a flat node's row of State.hidden; -1 = it did not run
    decided  bool[B] rows whose path the programs find
    request  what was asked for of the draft head
    drafted  what they draft, and what a second program did of other rows
    """

    batches: list[Batch]
    records: list[Any]
    place: Ints
    decided: Bools
    request: DraftRequest | None
    drafted: list[Drafted]


def asked_rows(plan: Plan, decided: Bools, drafted: Drafted | None = None) -> Rows:
    """What a step's programs do for its rows."""
    follows = np.zeros(plan.rows, np.bool_) if drafted is None else drafted.rows
    cold = np.zeros(plan.rows, np.float32)
    return Rows(decided, np.where(follows, plan.slots, -1).astype(np.int32), cold)


def receive(record: Any, batch: Batch, choice: Ints, drafted: Drafted | None = None) -> None:
    """Put what a program gave where it belongs; waits for it."""
    found = jax.device_get(record)
    _spread(choice, batch, found[: batch.size.total])
    if drafted is not None and len(found) > batch.size.total:
        drafted.fill(batch, found[batch.size.total :])


def key_of(batch: Batch, drafted: Drafted | None) -> Key:
    """The program that runs a batch; a round that follows nobody does not draft."""
    if batch.chunk:
        return Key("chunk", batch.size)
    if drafted is None or not drafted.rows[list(batch.rows)].any():
        return Key("round", batch.size)
    return Key("round", batch.size, drafted.width, drafted.levels)


def _spread(choice: Ints, batch: Batch, record: Ints) -> None:
    """Write a record's choices to their flat nodes, where it has any."""
    for nodes, line in zip(batch.nodes, record.reshape(batch.size), strict=False):
        found = line[: len(nodes)]
        choice[nodes] = np.where(found >= 0, found, choice[nodes])
