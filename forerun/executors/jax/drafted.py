"""What a step drafts for the next one, as its records arrive."""

from dataclasses import dataclass

import numpy as np

from forerun.executors.jax.batches import Batch
from forerun.interface.next_draft import NextDrafts
from forerun.speculative.draft_tree import full_size
from forerun.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a step drafts for the next one, completed as its records arrive: see NextDrafts."""

    rows: Bools
    width: int
    levels: int
    tokens: Ints
    parents: Ints
    value: Ints

    @classmethod
    def of(cls, rows: Bools, width: int, levels: int) -> "Drafted":
        """Nothing yet."""
        made = np.zeros((3, len(rows), full_size(width, levels)), np.int32)
        return cls(rows, width, levels, *made)

    def fill(self, batch: Batch, grown: Ints) -> None:
        """A record's trees: tokens, parents and values' bits of its rows."""
        lines = grown.reshape(3, batch.size.rows, -1)[:, : len(batch.rows)]
        for into, found in zip((self.tokens, self.parents, self.value), lines, strict=True):
            into[list(batch.rows)] = found

    def joined(self, made: Bools) -> NextDrafts:
        """As it goes out, of rows that were decided, bool[B]."""
        return NextDrafts(
            self.rows & made,
            self.width,
            self.levels,
            self.tokens,
            self.parents,
            self.value.view(np.float32),
        )
