"""A step's drafts for the next step, completed as its records arrive."""

from dataclasses import dataclass

import numpy as np

from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.rounds.batches import Batch
from forerun.interface.next_draft import NextDrafts
from forerun.speculative.tree import full_size
from forerun.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step's drafts for the next step, completed as its records arrive: see NextDrafts.

    sizes  of the network; confident: of width 0 if it does not say
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
