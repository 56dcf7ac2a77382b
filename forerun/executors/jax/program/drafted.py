"""A step's drafts for the next step, completed as its records arrive."""

from dataclasses import dataclass

import numpy as np

from forerun.executors.jax.rounds.batches import Batch
from forerun.interface.next_draft import NextDrafts
from forerun.speculative.tree import full_size
from forerun.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step's drafts for the next step, completed as its records arrive: see NextDrafts."""

    rows: Bools
    width: int
    levels: int
    tokens: Ints
    parents: Ints
    value: Ints

    @classmethod
    def of(cls, rows: Bools, width: int, levels: int) -> "Drafted":
        """Return arrays int32[B,K], all zero until `fill`, for the trees of the rows in bool[B]; K
        = full_size(width, levels).
        """
        made = np.zeros((3, len(rows), full_size(width, levels)), np.int32)
        return cls(rows, width, levels, *made)

    def fill(self, batch: Batch, grown: Ints) -> None:
        """Copy the trees of a batch's rows from its record, int32[3*R*K]: tokens, parents, and bits
        of values.
        """
        lines = grown.reshape(3, batch.size.rows, -1)[:, : len(batch.rows)]
        for into, found in zip((self.tokens, self.parents, self.value), lines, strict=True):
            into[list(batch.rows)] = found

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
        )
