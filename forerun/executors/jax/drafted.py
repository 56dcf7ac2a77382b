"""What a step drafts for the next one, as its records arrive."""

from dataclasses import dataclass, replace

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

    def only(self, rows: Bools) -> "Drafted":
        """Of these rows."""
        return replace(self, rows=self.rows & rows)


def joined(parts: list[Drafted]) -> NextDrafts:
    """As it goes out; the parts, of one shape, are of different rows."""
    whole, *others = parts
    rows, arrays = whole.rows, [whole.tokens, whole.parents, whole.value]
    for part in others:
        mine = part.rows[:, None]
        rows = rows | part.rows
        arrays = [
            np.where(mine, new, old)
            for new, old in zip((part.tokens, part.parents, part.value), arrays, strict=True)
        ]
    tokens, parents, value = arrays
    return NextDrafts(rows, whole.width, whole.levels, tokens, parents, value.view(np.float32))
