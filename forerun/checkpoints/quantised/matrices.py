"""Matrices stored in few bits, as float32. w [N,K] is the matrix, y = w x; q are its numbers, s
scales, z zero points, b offsets: w = s (q - z) + b. A stream has numbers one after another along K,
the lowest bits first. Experts' matrices may be one tensor, with an axis more in front of all parts.

float8  weight float8[N,K]; weight_scale_inv or weight_scale s, one for each block of rows and
        columns
int8    weight int8[N,K]; weight_scale s; weight_zero_point z int8, as s
packed  weight_packed int32[N,K/n], a stream, each more by 2^(bits-1); weight_scale s [N,K/group];
        weight_zero_point, packed likewise along N, int32[N/n,K/group]; weight_shape; weight_g_idx
gptq    qweight int32[K/n,N] along K; qzeros int32[K/group,N/n] along N; scales s [K/group,N];
        g_idx int32[K] the group of every column
awq     as gptq, but qweight int32[K,N/8] along N, and the eight numbers of a word are columns
        0, 2, 4, 6, 1, 3, 5, 7 of eight, in qzeros too; no g_idx
mlx     weight uint32[N,K*bits/32], a stream; scales s [N,K/group]; biases b, as s (MLX's affine
        mode), or q are floats and s bytes: exponents (mxfp4, mxfp8) or E4M3 (nvfp4)
blocks  NAME_blocks uint8[N,K/32,16], a stream of E2M1; NAME_scales uint8[N,K/32] exponents
        (gpt-oss)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.grouped import MIDDLE
from forerun.checkpoints.mapped import TensorEntry, TensorFile
from forerun.checkpoints.quantised.method import Layout, Method
from forerun.checkpoints.quantised.numbers import VALUES, streamed, unpacked, widened
from forerun.errors import ModelError
from forerun.types import AnyArray, Floats

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index within a word of each of eight columns' numbers."""

PARTS: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "float8": (("weight",), ("weight_scale_inv", "weight_scale")),
    "int8": (("weight", "weight_scale"), ("weight_zero_point",)),
    "packed": (
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
    ),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "mlx": (("weight", "scales"), ("biases",)),
    "blocks": (("blocks", "scales"), ()),
}
"""The tensors of a matrix in each layout: (required ones, of which the first identifies the layout;
optional ones).
"""
_SCALES = ("weight_scale_inv", "weight_scale", "scales")
_ORDERS = ("g_idx", "weight_g_idx")
"""Tensors with the group of each column."""

_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
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
        values = VALUES.get(self.method.numbers)
        wide = values[numbers] if values is not None else numbers.astype(np.float32)
        if shared.zeros is not None:
            wide -= shared.zeros.astype(np.float32)[:, column]
        elif self.middle:
            wide -= np.float32(self.middle)
        wide *= shared.scales[:, column]
        if shared.offsets is not None:
            wide += shared.offsets[:, column]
        return wide

    @property
    def middle(self) -> int:
        """The zero point of all numbers, if groups have none of their own."""
        return MIDDLE if self.method.layout == "packed" and self.method.bits == 4 else 0

    def numbers(self, rows: slice, columns: slice) -> AnyArray:
        """Return [n,k], the numbers of some rows and columns: int8 if they are integers of 8 bits
        without offsets, those from 0 to 255 less 128; else uint8.
        """
        return _NUMBERS[self.method.layout](self, rows, columns)

    def shared(self, rows: slice, groups: slice = _ALL) -> Shared:
        """Return what some groups of some rows share. Axes that are one block have length 1."""
        layout, method = self.method.layout, self.method
        scale = next(name for name in _SCALES if name in self.parts)
        if layout in ("gptq", "awq"):
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
        return Shared(self._finite(scale, of_rows, groups)[spread], zeros, offsets)

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
        return flat.view(_INTEGERS[entry.kind]).reshape(entry.shape)

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
        columns = _count(self.shape[1], self.method.group)
        if self.method.layout in ("gptq", "awq"):
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
        if not np.isfinite(wide).all():
            how = (
                "has a scale of 255, which means NaN" if kind == "E8M0" else "holds NaN or infinity"
            )
            raise ModelError(f"{self.parts[part][1]} {how}; the file is damaged")
        return wide


def stored_matrix(
    name: str, methods: tuple[Method, ...], parts: Mapping[str, tuple[TensorFile, str]]
) -> StoredMatrix:
    """Return the matrix of a module's tensors, by the method that fits them, checked. Raises
    ModelError naming the tensor that is missing, left over, of another type or of another shape.
    """
    named = [method for method in methods if name in method.modules]
    methods = tuple(named or (method for method in methods if not method.modules))
    fitting = [method for method in methods if parts.keys() >= set(PARTS[method.layout][0])]
    if not fitting:
        required = " or ".join(sorted({", ".join(PARTS[method.layout][0]) for method in methods}))
        raise ModelError(f"{name} has {', '.join(sorted(parts))}; it needs {required}")
    # Groups of modules differ at most in size, which the shape of the scales shows.
    faults = []
    for method in fitting:
        try:
            return _checked(name, method, parts)
        except ModelError as error:
            faults.append(error)
    raise faults[0]


def _checked(
    name: str, method: Method, parts: Mapping[str, tuple[TensorFile, str]]
) -> StoredMatrix:
    required, optional = PARTS[method.layout]
    rest = sorted(parts.keys() - set(required) - set(optional))
    if rest:
        raise ModelError(f"{name} has {', '.join(rest)}, which {method.title} has not")
    if {"weight_scale_inv", "weight_scale"} <= parts.keys():
        raise ModelError(f"{name} has weight_scale_inv and weight_scale; {method.title} has one")
    shapes = {part: file.tensors[stored].shape for part, (file, stored) in parts.items()}
    kinds = {part: file.tensors[stored].kind for part, (file, stored) in parts.items()}
    whole = _shape(name, method, shapes, parts)
    for part, (allowed, types) in _expected(method, whole, shapes).items():
        if part not in shapes:
            other = ", and so is weight_scale_inv" if part == "weight_scale" else ""
            raise ModelError(f"{name}.{part} is missing{other}; {method.title} needs it")
        if kinds[part] not in types:
            raise ModelError(
                f"{parts[part][1]} is stored as {kinds[part]}, not {' or '.join(types)}"
            )
        if shapes[part] not in allowed:
            expected_text = " or ".join(str(list(each)) for each in allowed)
            raise ModelError(
                f"{parts[part][1]} is {list(shapes[part])}, not {expected_text}: "
                f"{method.title}, a matrix of {' x '.join(map(str, whole))}"
            )
    return StoredMatrix(name, method, parts, whole)


def _shape(
    name: str,
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[TensorFile, str]],
) -> tuple[int, ...]:
    """Return (N, K), or (experts, N, K), from the tensor with the numbers."""
    first = PARTS[method.layout][0][0]
    known = shapes[first]
    if method.layout == "blocks":
        if len(known) != 4 or known[3] * 2 != method.group:
            raise ModelError(
                f"{parts[first][1]} is {list(known)}; it must be [experts, rows, groups, 16]"
            )
        return (*known[:2], known[2] * method.group)
    if len(known) != 2 and (method.layout != "mlx" or len(known) != 3):
        raise ModelError(f"{name} is stored as {list(known)}; it must have two dimensions")
    words = 32 // method.bits
    match method.layout:
        case "gptq":
            return known[1], known[0] * words
        case "awq":
            return known[1] * words, known[0]
        case "packed":
            return known[0], _declared_columns(name, shapes, parts, known[1] * words, known[0])
        case "mlx":
            return (*known[:-1], known[-1] * 32 // method.bits)
    return known


def _declared_columns(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[TensorFile, str]],
    most: int,
    rows: int,
) -> int:
    """Return K from weight_shape, since the last word of a row may not be full."""
    if "weight_shape" not in parts:
        return most
    file, stored = parts["weight_shape"]
    there = file.tensors[stored]
    if there.shape != (2,) or there.kind not in ("I32", "I64"):
        raise ModelError(f"{name}.weight_shape is not two whole numbers")
    flat = file.data[there.start : there.start + there.size].view(_INTEGERS[there.kind])
    declared_rows, declared = flat.tolist()
    if declared_rows != rows or not most - 32 < declared <= most:
        raise ModelError(
            f"{name}.weight_shape says {declared_rows} x {declared}, its tensors otherwise"
        )
    return int(declared)


_Expected = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]]
_FLOATS = ("F32", "F16", "BF16")


def _expected(
    method: Method, whole: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> _Expected:
    """Return the shapes and types that each tensor may have."""
    rows, columns = whole[-2:]
    words = 32 // method.bits
    groups = _count(columns, method.group)
    scale_types = ("U8",) if method.scale else _FLOATS
    if method.layout in ("mlx", "blocks"):
        shared = ((*whole[:-1], groups),)
        if method.layout == "blocks":
            return {"blocks": ((shapes["blocks"],), ("U8",)), "scales": (shared, scale_types)}
        packed = (*whole[:-1], columns * method.bits // 32)
        expected: _Expected = {"weight": ((packed,), ("U32",)), "scales": (shared, scale_types)}
        return expected | ({} if method.scale else {"biases": (shared, scale_types)})
    if method.layout in ("gptq", "awq"):
        expected = {
            "qzeros": (((groups, rows // words),), ("I32",)),
            "scales": (((groups, rows),), _FLOATS),
            PARTS[method.layout][0][0]: ((shapes["qweight"],), ("I32",)),
        }
        if "g_idx" in shapes:
            expected["g_idx"] = (((columns,),), ("I32",))
        return expected
    blocks = (_count(rows, method.rows), groups)
    scales: list[tuple[int, ...]] = [blocks]
    if blocks == (1, 1):
        scales += [(1,), ()]
    elif blocks[1] == 1:
        scales.append((blocks[0],))
    scale = "weight_scale_inv" if "weight_scale_inv" in shapes else "weight_scale"
    expected = {scale: (tuple(scales), _FLOATS)}
    if method.layout == "packed":
        expected["weight_packed"] = (((rows, -(-columns // words)),), ("I32",))
        if method.zeros:
            expected["weight_zero_point"] = (((-(-rows // words), groups),), ("I32",))
        if "weight_g_idx" in shapes:
            expected["weight_g_idx"] = (((columns,),), ("I32",))
        return expected
    if method.layout == "int8":
        expected["weight"] = ((whole,), ("I8",))
        if method.zeros:
            expected["weight_zero_point"] = (tuple(scales), ("I8",))
    else:
        expected["weight"] = ((whole,), ("F8_E4M3",))
    return expected


def _count(length: int, part: int) -> int:
    """Return the number of blocks of `part` in `length`, of which the last may be smaller; 0 = one
    block.
    """
    return -(-length // part) if part else 1


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
    return numbers.view(np.int8) if matrix.method.layout == "int8" else numbers


def _of_stream(matrix: StoredMatrix, rows: slice, columns: slice) -> AnyArray:
    """Unpack uint8[n,k] of a stream: eight numbers are as many bytes as a number has bits."""
    method = matrix.method
    eights, inside = _within(columns, 8)
    octets = slice(eights.start * method.bits, eights.stop * method.bits)
    part = PARTS[method.layout][0][0]
    numbers = streamed(matrix.bytes_of(part)[rows, octets], method.bits)[:, inside]
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
    return np.ascontiguousarray(_awq_numbers(matrix, "qweight", columns, rows).T)


def _awq_numbers(matrix: StoredMatrix, part: str, lines: slice, rows: slice) -> NDArray[np.uint8]:
    """Unpack uint8[lines,rows] of a tensor in AWQ's order."""
    words, inside = _within(rows, 8)
    numbers = unpacked(matrix.integers(part)[lines, words], 4)[..., list(_AWQ_PLACES)]
    return numbers.reshape(len(numbers), -1)[:, inside]


def _zeros(matrix: StoredMatrix, rows: slice) -> AnyArray:
    """Unpack [groups,n], the zero points of some rows, of "gptq" and "awq"."""
    method = matrix.method
    if method.layout == "awq":
        return _awq_numbers(matrix, "qzeros", _ALL, rows)
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
}
