"""Matrices stored in few bits, as float32, by the definitions of their layouts (layouts.py)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.grouped import MIDDLE
from forerun.checkpoints.mapped import TensorEntry, TensorFile
from forerun.checkpoints.quantised.layouts import INTEGERS, PARTS, QuantState, count, fitting
from forerun.checkpoints.quantised.method import Layout, Method
from forerun.checkpoints.quantised.numbers import VALUES, streamed, unpacked, widened
from forerun.errors import ModelError
from forerun.types import AnyArray, Floats

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index within a word of each of eight columns' numbers."""

_SCALES = ("weight_scale_inv", "weight_scale", "scales", "absmax", "SCB")
_TURNED: tuple[Layout, ...] = ("gptq", "awq", "quark")
"""Layouts whose tensors have a column for each row of the matrix."""
_ORDERS = ("g_idx", "weight_g_idx")
"""Tensors with the group of each column."""

_SHARE = np.float32(1 / 127)
"""What bitsandbytes multiplies the largest number of a row by."""
_ALL = slice(None)


class Shared(NamedTuple):
    """What the columns of a group share, for some rows and groups; see the module.

    scales   float32[n,groups]
    zeros    [n,groups] of the type of the numbers; None if there are none
    offsets  float32[n,groups]; None if there are none
    """

    scales: Floats
    zeros: AnyArray | None = None
    offsets: Floats | None = None


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix in its file, or one of all experts, below one another.

    name   of its module, for messages
    parts  last part of a tensor's name -> (the file that has it, its name there)
    whole  (N, K), or (experts, N, K)
    """

    name: str
    method: Method
    parts: Mapping[str, tuple[TensorFile, str]]
    whole: tuple[int, ...]
    _known: dict[str, bool | None] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of all experts together."""
        return math.prod(self.whole[:-1]), self.whole[-1]

    def floats(self) -> Floats:
        """Return float32 of its `whole` shape. Raises ModelError if a column's group does not
        exist, or a scale is not finite.
        """
        return self.part(slice(0, self.shape[0]), slice(0, self.shape[1])).reshape(self.whole)

    def part(self, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k] of these rows and columns. Only the words that contain them, and
        their groups' scales, are read. A group that is cut keeps its scale on both sides.
        """
        rows, columns = (
            slice(*part.indices(size)[:2])
            for part, size in zip((rows, columns), self.shape, strict=True)
        )
        groups, column = self.groups(columns)
        shared, numbers = self.shared(rows, groups), self.numbers(rows, columns)
        values = self.values()
        wide = values[numbers] if values is not None else numbers.astype(np.float32)
        if shared.zeros is not None:
            wide -= shared.zeros.astype(np.float32)[:, column]
        elif self.middle:
            wide -= np.float32(self.middle)
        wide *= shared.scales[:, column]
        if shared.offsets is not None:
            wide += shared.offsets[:, column]
        return wide

    def values(self) -> Floats | None:
        """Return what numbers mean, as VALUES; None: themselves."""
        if "quant_map" not in self.parts:
            return VALUES.get(self.method.numbers)
        return self._table("quant_map")

    def _table(self, part: str) -> Floats:
        """Return a vector of floats. Raises ModelError if one is not finite."""
        entry, flat = self._stored(part)
        return self._checked(part, widened(flat, entry.kind), entry.kind)

    @property
    def middle(self) -> int:
        """The zero point of all numbers, if groups have none of their own."""
        method = self.method
        four = method.bits == 4 and method.numbers == "integers"
        return MIDDLE if method.layout == "packed" and four else 0

    def unit(self) -> tuple[np.float32, np.float32]:
        """Return what scales that are E4M3 are multiplied by and then divided by. Raises ModelError
        for numbers that are not finite and positive.
        """
        ones = []
        for part in ("weight_scale_2", "weight_global_scale"):
            ones.append(np.float32(1))
            if part in self.parts:
                entry, flat = self._stored(part)
                ones[-1] = widened(flat, entry.kind)[0]
                if not 0 < ones[-1] < np.inf:
                    name = self.parts[part][1]
                    raise ModelError(f"{name} is {ones[-1]}; it must be finite and positive")
        return ones[0], ones[1]

    def numbers(self, rows: slice, columns: slice) -> AnyArray:
        """Return [n,k], the numbers of some rows and columns: int8 if they are integers of 8 bits
        without offsets, those from 0 to 255 less 128; else uint8.
        """
        return _NUMBERS[self.method.layout](self, rows, columns)

    def shared(self, rows: slice, groups: slice = _ALL) -> Shared:
        """Return what some groups of some rows share. Axes that are one block have length 1."""
        layout, method = self.method.layout, self.method
        scale = next(name for name in _SCALES if name in self.parts)
        if layout in _TURNED:
            return Shared(self._finite(scale, groups, rows).T, _zeros(self, rows)[groups].T)
        each = method.rows
        spread: AnyArray | slice = _ALL
        of_rows: slice = rows if each else _ALL
        if each > 1:
            of_rows = slice(rows.start // each, (rows.stop - 1) // each + 1)
            spread = np.arange(rows.start, rows.stop) // each - of_rows.start
        zeros = offsets = None
        if layout == "packed" and method.zeros:
            zeros = packed_zeros(self, rows, groups)
        elif "weight_zero_point" in self.parts:
            zeros = self._plane("weight_zero_point").view(np.int8)[of_rows, groups][spread]
        if "biases" in self.parts:
            offsets = self._finite("biases", of_rows, groups)
        if "nested_absmax" in self.parts:
            return Shared(self._nested(rows, groups))
        scales = self._finite(scale, of_rows, groups)[spread]
        if scale == "SCB":
            scales = scales * _SHARE
        if self.method.scale == "E4M3":
            times, by = self.unit()
            scales = scales * times / by
        return Shared(scales, zeros, offsets)

    def _nested(self, rows: slice, groups: slice) -> Floats:
        """Return scales float32[n,groups] that are quantised themselves (bitsandbytes)."""
        codes = self._plane("absmax")
        places = np.arange(codes.size).reshape(codes.shape)[rows, groups] // QuantState.nested
        scales = self._table("nested_quant_map")[codes[rows, groups]]
        scales *= self._table("nested_absmax")[places]
        return scales + np.float32(QuantState.of(self.name, self.parts).offset)

    def groups(self, columns: slice) -> tuple[slice, AnyArray | slice]:
        """Return the groups that contain these columns, and for each of these the index of its
        group among them; a slice if all have one.
        """
        named = next((name for name in _ORDERS if name in self.parts), None)
        if named is not None and self.method.group:
            return _ALL, self.column_groups(named)[columns]
        if not self.method.group:
            return _ALL, _ALL
        first = columns.start // self.method.group
        last = -(-columns.stop // self.method.group)
        return slice(first, last), np.arange(
            columns.start, columns.stop
        ) // self.method.group - first

    def order(self) -> AnyArray | None:
        """Return int[K], the group of every column, if it is in the file and not that of their
        order; else None.
        """
        named = next((name for name in _ORDERS if name in self.parts), None)
        if named is None or not self.method.group:
            return None
        groups = self.column_groups(named)
        expected = np.arange(self.shape[1]) // self.method.group
        return None if np.array_equal(groups, expected) else groups

    def column_groups(self, part: str) -> AnyArray:
        """Return int[K], each column's group. Raises ModelError if one does not exist."""
        groups = self.integers(part)
        count = -(-self.shape[1] // self.method.group)
        if groups.min() < 0 or groups.max() >= count:
            raise ModelError(
                f"{self.name}.{part} names groups {int(groups.min())} to {int(groups.max())}; "
                f"there are {count}"
            )
        return groups

    def halves(self) -> bool | None:
        """Return whether float16 represents all scales and offsets; None if one is beyond its
        range. Reads them all, once.
        """
        if "halves" not in self._known:
            shared = self.shared(slice(0, self.shape[0]))
            with np.errstate(over="ignore"):
                numbers = (shared.scales, shared.offsets)
                pairs = [(n, n.astype(np.float16)) for n in numbers if n is not None]
            same = all(np.array_equal(number, half) for number, half in pairs)
            fits = same or all(np.isfinite(half).all() for _, half in pairs)
            self._known["halves"] = same if fits else None
        return self._known["halves"]

    def integers(self, part: str) -> AnyArray:
        """Return a tensor of integers as stored, a view. Raises KeyError unless there is a `part`
        such as "qweight".
        """
        entry, flat = self._stored(part)
        return flat.view(INTEGERS[entry.kind]).reshape(entry.shape)

    def bytes_of(self, part: str) -> NDArray[np.uint8]:
        """Return uint8[N,bytes of a row], a view of a tensor with a row for each of the matrix."""
        return self._stored(part)[1].reshape(self.shape[0], -1)

    def kind_of_scales(self) -> str:
        """Return the stored type of the scales."""
        return self._stored(next(name for name in _SCALES if name in self.parts))[0].kind

    def _stored(self, part: str) -> tuple[TensorEntry, NDArray[np.uint8]]:
        file, stored = self.parts[part]
        there = file.tensors[stored]
        return there, file.data[there.start : there.start + there.size]

    def _plane(self, part: str) -> NDArray[np.uint8]:
        """Return a tensor of scales [rows,columns], a vector of which is a column: its numbers if
        they are bytes, else with the bytes of each on one axis more.
        """
        entry, flat = self._stored(part)
        columns = count(self.shape[1], self.method.group)
        if self.method.layout in _TURNED:
            columns = self.shape[0]
        size = entry.size // math.prod(entry.shape)
        return flat.reshape(-1, columns, *((size,) if size > 1 else ()))

    def _finite(self, part: str, rows: slice, columns: slice) -> Floats:
        """Return a part of a tensor of scales as float32[rows,columns]. Raises ModelError naming it
        if a number is NaN or infinite.
        """
        values = self._plane(part)[rows, columns]
        kind = self.method.scale or self._stored(part)[0].kind
        wide = widened(np.ascontiguousarray(values).ravel(), kind).reshape(values.shape[:2])
        return self._checked(part, wide, kind)

    def _checked(self, part: str, wide: Floats, kind: str) -> Floats:
        if not np.isfinite(wide).all():
            how = (
                "has a scale of 255, which means NaN" if kind == "E8M0" else "holds NaN or infinity"
            )
            raise ModelError(f"{self.parts[part][1]} {how}; the file is damaged")
        return wide


def stored_matrix(
    name: str, methods: tuple[Method, ...], parts: Mapping[str, tuple[TensorFile, str]]
) -> StoredMatrix:
    """Return the matrix of a module's tensors, checked. Raises ModelError as `fitting`."""
    method, whole = fitting(name, methods, parts)
    return StoredMatrix(name, method, parts, whole)


def _within(part: slice, each: int) -> tuple[slice, slice]:
    """Return the words, with `each` numbers per word, that contain a part of the numbers, and the
    part's place within them.
    """
    first = part.start // each
    inside = slice(part.start - first * each, part.stop - first * each)
    return slice(first, -(-part.stop // each)), inside


def _signed(matrix: StoredMatrix, numbers: NDArray[np.uint8]) -> AnyArray:
    """Return 8-bit integers from 0 to 255 as int8, less 128; smaller ones unchanged."""
    return numbers if matrix.method.bits < 8 else (numbers ^ np.uint8(128)).view(np.int8)


def _whole_bytes(matrix: StoredMatrix, rows: slice, columns: slice) -> AnyArray:
    numbers = matrix.bytes_of("weight")[rows, columns]
    return numbers if matrix.method.numbers == "float8" else numbers.view(np.int8)


def _of_stream(matrix: StoredMatrix, rows: slice, columns: slice) -> AnyArray:
    """Unpack uint8[n,k] of a stream: eight numbers are as many bytes as a number has bits."""
    method = matrix.method
    eights, inside = _within(columns, 8)
    octets = slice(eights.start * method.bits, eights.stop * method.bits)
    stored = matrix.bytes_of(PARTS[method.layout][0][0])[rows, octets]
    if method.layout == "bnb4":
        stored = np.bitwise_or(stored >> 4, stored << 4, dtype=np.uint8)
    numbers = streamed(stored, method.bits)[:, inside]
    return _signed(matrix, numbers) if method.layout == "packed" else numbers


def packed_zeros(matrix: StoredMatrix, rows: slice, of_columns: slice) -> AnyArray:
    """Unpack [n,groups], the zero points of some rows and groups of columns, of "packed"."""
    words, inside = _within(rows, 32 // matrix.method.bits)
    zeros = matrix.integers("weight_zero_point")[words, of_columns]
    packed = unpacked(zeros, matrix.method.bits)
    return _signed(matrix, packed.swapaxes(1, 2).reshape(-1, packed.shape[1])[inside])


def _of_gptq(matrix: StoredMatrix, rows: slice, columns: slice) -> AnyArray:
    bits = matrix.method.bits
    words, inside = _within(columns, 32 // bits)
    numbers = unpacked(matrix.integers("qweight")[words, rows], bits)
    whole = numbers.transpose(1, 0, 2).reshape(numbers.shape[1], -1)[:, inside]
    return _signed(matrix, whole)


def _of_awq(matrix: StoredMatrix, rows: slice, columns: slice) -> AnyArray:
    part = PARTS[matrix.method.layout][0][0]
    return np.ascontiguousarray(_awq_numbers(matrix, part, columns, rows).T)


def _awq_numbers(matrix: StoredMatrix, part: str, lines: slice, rows: slice) -> NDArray[np.uint8]:
    """Unpack uint8[lines,rows] of a tensor in AWQ's order."""
    words, inside = _within(rows, 8)
    numbers = unpacked(matrix.integers(part)[lines, words], 4)[..., list(_AWQ_PLACES)]
    whole = numbers.reshape(len(numbers), -1)[:, inside]
    return whole ^ np.uint8(8) if matrix.method.signed else whole


def _zeros(matrix: StoredMatrix, rows: slice) -> AnyArray:
    """Unpack [groups,n], the zero points of some rows, of "gptq" and "awq"."""
    method = matrix.method
    if method.layout != "gptq":
        return _awq_numbers(matrix, PARTS[method.layout][0][1], _ALL, rows)
    words, inside = _within(rows, 32 // method.bits)
    zeros = unpacked(matrix.integers("qzeros")[:, words], method.bits)
    zeros = zeros.reshape(len(zeros), -1)[:, inside]
    if method.minus_one:
        zeros = zeros + np.uint8(1) & np.uint8((1 << method.bits) - 1)
    return _signed(matrix, zeros)


_NUMBERS: dict[Layout, Callable[[StoredMatrix, slice, slice], AnyArray]] = {
    "float8": _whole_bytes,
    "int8": _whole_bytes,
    "packed": _of_stream,
    "gptq": _of_gptq,
    "awq": _of_awq,
    "mlx": _of_stream,
    "blocks": _of_stream,
    "fp4": _of_stream,
    "quark": _of_awq,
    "bnb4": _of_stream,
    "bnb8": _whole_bytes,
}
