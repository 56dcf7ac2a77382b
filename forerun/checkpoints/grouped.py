"""Quantised matrices whose columns share scales in groups, as stored in their files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ModelError
from forerun.types import AnyArray, Floats, Ints

GroupedKind = Literal["int4", "int5", "int8", "float8", "mxfp4"]
"""Integers from 0 to 15, from 0 to 31, or from -128 to 127, bytes of float8 E4M3, or 4 bits of E2M1
with powers of two as scales.
"""

MIDDLE = 8
"""Zero point of 4-bit integers without one of their own."""


def whole_block(columns: int) -> int:
    """Return the columns that products read at once if a row has one scale."""
    return 128 if columns > 64 else 64 if columns > 32 else 32


class GroupedRows(NamedTuple):
    """Some rows of a matrix; see Grouped.

    numbers  uint8[n,K], or int8 for 8-bit integers, in the order of `Grouped.order`
    scales   float32[n,groups]
    zeros    [n,groups] of the type of `numbers`; None if there are none
    offsets  float32[n,groups]; None if there are none
    """

    numbers: AnyArray
    scales: Floats
    zeros: AnyArray | None = None
    offsets: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A matrix w [N,K] of numbers q, scales s, zero points z and offsets b. For number j in a row,
    whose group is g = j // group, w[:, order[j]] = s[:, g] (q[:, j] - z[:, g]) + b[:, g].

    shape  (N, K)
    group  columns that share a scale; the last group may be smaller
    zeros  whether there are zero points; else they are MIDDLE of 4-bit integers, and 0
    scale  "F16", "BF16" or "F32": the stored type of the scales, which holds them exactly
    order  int32[K] the column of every number in a row; None: its own
    read   reads some rows; touches little else of the file. Raises ModelError for NaN
    offsets  whether there are offsets; else they are 0
    halves   returns whether float16 represents all scales and offsets; None: one is out of range
    """

    kind: GroupedKind
    shape: tuple[int, int]
    group: int
    zeros: bool
    scale: str
    order: Ints | None
    read: Callable[[slice], GroupedRows]
    offsets: bool = False
    halves: Callable[[], bool | None] = lambda: True

    @property
    def block(self) -> int:
        """Columns that torch's products read at once, all of one group; 0 if they cannot read
        it.
        """
        columns = self.shape[1]
        if self.offsets or self.kind == "mxfp4":
            return 0
        if self.group >= columns:
            return whole_block(columns)
        return next((block for block in (128, 64, 32) if self.group % block == 0), 0)

    @property
    def groups(self) -> int:
        """Number of groups in a row; the last may be smaller."""
        return -(-self.shape[1] // self.group)

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory, with rows padded to whole blocks."""
        rows, columns = self.shape
        numbers = -(-columns // self.block) * self.block // (2 if self.kind == "int4" else 1)
        each = (4 if self.scale == "F32" else 2) + 4 * self.zeros
        return rows * (numbers + self.groups * each) + (
            4 * columns if self.order is not None else 0
        )

    def title(self) -> str:
        """Return its format as text: "4-bit integers in groups of 128"."""
        what = {"int4": "4-bit integers", "int8": "8-bit integers", "float8": "float8"}[self.kind]
        per_row = self.group >= self.shape[1]
        return f"{what} with a scale per row" if per_row else f"{what} in groups of {self.group}"

    def rows(self, which: AnyArray) -> "Grouped":
        """Return the matrix of the rows `which` int[n], at least one, in this order. Reads nothing
        yet.
        """
        first, last = int(which.min()), int(which.max())

        def read(rows: slice) -> GroupedRows:
            selected = which[rows]
            low = int(selected.min())
            read_rows = self.read(slice(low, int(selected.max()) + 1))
            parts = (None if part is None else part[selected - low] for part in read_rows)
            return GroupedRows(*parts)  # type: ignore[arg-type]

        assert first >= 0 and last < self.shape[0]
        return replace(self, shape=(len(which), self.shape[1]), read=read)

    def cut(self, rows: slice, columns: slice) -> "Grouped | None":
        """Return a part of the matrix; None if it begins within a group, or columns have an
        order.
        """
        start, stop, _ = columns.indices(self.shape[1])
        first, last, _ = rows.indices(self.shape[0])
        own = slice(first, last)
        if (start, stop) == (0, self.shape[1]):
            return replace(
                self,
                shape=(last - first, stop),
                read=lambda part: self.read(_within(own, part)),
            )
        if self.order is not None or (start % self.group and self.group < self.shape[1]):
            return None
        per_row = self.group >= self.shape[1]
        groups = slice(0, 1) if per_row else slice(start // self.group, -(-stop // self.group))

        def read(part: slice) -> GroupedRows:
            numbers, *shared = self.read(_within(own, part))
            cut = (None if one is None else one[:, groups] for one in shared)
            return GroupedRows(numbers[:, start:stop], *cut)  # type: ignore[arg-type]

        group = self.group if not per_row else stop - start
        return replace(self, shape=(last - first, stop - start), group=group, read=read)


def _within(outer: slice, part: slice) -> slice:
    """Return the part `part` of what begins at `outer`."""
    stop = outer.stop if part.stop is None else min(outer.start + part.stop, outer.stop)
    return slice(outer.start + (part.start or 0), stop)


def check_float8(numbers: NDArray[np.uint8], name: str) -> None:
    """Raise ModelError, naming the matrix, if a byte of float8 E4M3 is NaN."""
    if (numbers & 127).max(initial=0) == 127:
        raise ModelError(f"{name} holds NaN; the file is damaged")
