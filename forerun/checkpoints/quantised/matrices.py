"""Matrices stored in few bits, as float32. w [N,K] is the matrix, y = w x; s are scales, z zeros.

float8  weight float8[N,K]; weight_scale_inv or weight_scale s, one for each block of rows and
columns:                                          w = s q
int8    weight int8[N,K]; weight_scale s; weight_zero_point z int8, as s:    w = s (q - z)
packed  weight_packed int32[N,K/n], n = 32 / bits numbers in a word along K, the lowest bits
first, each more by 2^(bits-1); weight_scale s [N,K/group]; weight_zero_point, packed
likewise along N, int32[N/n,K/group]; weight_shape; weight_g_idx:    w = s (q - z)
gptq    qweight int32[K/n,N] along K; qzeros int32[K/group,N/n] along N; scales s [K/group,N];
g_idx int32[K] the group of every column:         w[:,k] = s[g_k] (q - z[g_k])
awq     as gptq, but qweight int32[K,N/8] along N, and the eight numbers of a word are columns
0, 2, 4, 6, 1, 3, 5, 7 of eight, in qzeros too; no g_idx
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.mapped import TensorFile
from forerun.checkpoints.quantised.method import Layout, Method
from forerun.checkpoints.quantised.numbers import unpacked, widened
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
}
"""The tensors of a matrix in each layout: (required ones, of which the first identifies the layout;
optional ones).
"""

_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix in its file.

    name   of its module, for messages
    parts  last part of a tensor's name -> (the file that has it, its name there)
    shape  (N, K)
    """

    name: str
    method: Method
    parts: Mapping[str, tuple[TensorFile, str]]
    shape: tuple[int, int]

    def floats(self) -> Floats:
        """Return float32[N,K]. Raises ModelError if a column's group does not exist."""
        return self.part(slice(0, self.shape[0]), slice(0, self.shape[1]))

    def part(self, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k] of these rows and columns. Only the words that contain them, and
        their groups' scales, are read. A group that is cut keeps its scale on both sides.
        """
        return _WIDEN[self.method.layout](self, rows, columns)

    def integers(self, part: str) -> AnyArray:
        """Return a tensor of integers as stored, a view. Raises KeyError unless there is a `part`
        such as "qweight".
        """
        file, stored = self.parts[part]
        there = file.tensors[stored]
        flat = file.data[there.start : there.start + there.size]
        return flat.view(_INTEGERS[there.kind]).reshape(there.shape)

    def scales(self, part: str, rows: slice = _ALL, columns: slice = _ALL) -> Floats:
        """Return a part of a tensor of floats [rows,columns] as float32; a vector is a column, a
        scalar [1,1].
        """
        file, stored = self.parts[part]
        there = file.tensors[stored]
        shape = _two(there.shape)
        flat = file.data[there.start : there.start + there.size]
        values = flat.reshape(*shape, -1)[rows, columns]
        return widened(np.ascontiguousarray(values).ravel(), there.kind).reshape(values.shape[:2])


def stored_matrix(
    name: str, methods: tuple[Method, ...], parts: Mapping[str, tuple[TensorFile, str]]
) -> StoredMatrix:
    """Return the matrix of a module's tensors, by the method that fits them, checked. Raises
    ModelError naming the tensor that is missing, left over, of another type or of another shape.
    """
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
    shape = _shape(name, method, shapes, parts)
    for part, (allowed, types) in _expected(method, shape, shapes).items():
        if part not in shapes:
            other = ", and so is weight_scale_inv" if part == "weight_scale" else ""
            raise ModelError(f"{name}.{part} is missing{other}; {method.title} needs it")
        if kinds[part] not in types:
            raise ModelError(f"{name}.{part} is stored as {kinds[part]}, not {' or '.join(types)}")
        if shapes[part] not in allowed:
            expected_text = " or ".join(str(list(each)) for each in allowed)
            raise ModelError(
                f"{name}.{part} is {list(shapes[part])}, not {expected_text}: "
                f"{method.title}, a matrix of {shape[0]} x {shape[1]}"
            )
    return StoredMatrix(name, method, parts, shape)


def _shape(
    name: str,
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[TensorFile, str]],
) -> tuple[int, int]:
    """Return (N, K), from the tensor with the numbers."""
    known = shapes[PARTS[method.layout][0][0]]
    if len(known) != 2:
        raise ModelError(f"{name} is stored as {list(known)}; it must have two dimensions")
    words = 32 // method.bits
    match method.layout:
        case "gptq":
            return known[1], known[0] * words
        case "awq":
            return known[1] * words, known[0]
        case "packed":
            return known[0], _declared_columns(name, shapes, parts, known[1] * words, known[0])
    return known[0], known[1]


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
    method: Method, shape: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]
) -> _Expected:
    """Return the shapes and types that each tensor may have."""
    rows, columns = shape
    words = 32 // method.bits
    groups = _count(columns, method.group)
    if method.layout in ("gptq", "awq"):
        expected: _Expected = {
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
        expected["weight"] = ((shape,), ("I8",))
        if method.zeros:
            expected["weight_zero_point"] = (tuple(scales), ("I8",))
    else:
        expected["weight"] = ((shape,), ("F8_E4M3",))
    return expected


def _count(length: int, part: int) -> int:
    """Return the number of blocks of `part` in `length`, of which the last may be smaller; 0 = one
    block.
    """
    return -(-length // part) if part else 1


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0] if shape else 1, math.prod(shape[1:]))


def _within(part: slice, each: int) -> tuple[slice, slice]:
    """Return the words, with `each` numbers per word, that contain a part of the numbers, and the
    part's place within them.
    """
    first = part.start // each
    inside = slice(part.start - first * each, part.stop - first * each)
    return slice(first, -(-part.stop // each)), inside


def _blocks(part: slice, each: int) -> tuple[slice, AnyArray | slice]:
    """Return the blocks of `each` numbers that contain a part (0 = one block for all), and for each
    of its numbers the index of its block; a slice if every number has a block of its own, or all
    have one.
    """
    if each == 0:
        return _ALL, _ALL
    if each == 1:
        return part, _ALL
    blocks, _ = _within(part, each)
    return blocks, np.arange(part.start, part.stop) // each - blocks.start


def _spread(matrix: StoredMatrix, read: "_Read", rows: slice, columns: slice) -> AnyArray:
    """Return [n,k] from one number per block of rows and columns; axes of one block stay as they
    are.
    """
    of_rows, row = _blocks(rows, matrix.method.rows)
    of_columns, column = _blocks(columns, matrix.method.group)
    return read(of_rows, of_columns)[row][:, column]


_Read = Callable[[slice, slice], AnyArray]


def _read(matrix: StoredMatrix, part: str) -> _Read:
    if matrix.parts[part][0].tensors[matrix.parts[part][1]].kind in _INTEGERS:
        whole = matrix.integers(part)
        return lambda rows, columns: whole.reshape(_two(whole.shape))[rows, columns].astype(
            np.float32
        )
    return lambda rows, columns: matrix.scales(part, rows, columns)


def _of_float8(matrix: StoredMatrix, rows: slice, columns: slice) -> Floats:
    scale = next(name for name in ("weight_scale_inv", "weight_scale") if name in matrix.parts)
    file, stored = matrix.parts["weight"]
    there = file.tensors[stored]
    flat = file.data[there.start : there.start + there.size].reshape(matrix.shape)
    numbers = widened(flat[rows, columns], "F8_E4M3")
    numbers *= _spread(matrix, _read(matrix, scale), rows, columns)
    return numbers


def _of_int8(matrix: StoredMatrix, rows: slice, columns: slice) -> Floats:
    numbers = matrix.integers("weight")[rows, columns].astype(np.float32)
    if "weight_zero_point" in matrix.parts:
        numbers -= _spread(matrix, _read(matrix, "weight_zero_point"), rows, columns)
    numbers *= _spread(matrix, _read(matrix, "weight_scale"), rows, columns)
    return numbers


def _of_packed(matrix: StoredMatrix, rows: slice, columns: slice) -> Floats:
    method = matrix.method
    wide = packed_numbers(matrix, rows, columns).astype(np.float32)
    of_rows, row = _blocks(rows, method.rows)
    of_columns, column = _blocks(columns, method.group)
    if "weight_g_idx" in matrix.parts and method.group:
        count = matrix.parts["weight_scale"]
        groups = _two(count[0].tensors[count[1]].shape)[1]
        of_columns, column = _ALL, column_groups(matrix, "weight_g_idx", groups)[columns]
    if method.zeros:
        wide -= packed_zeros(matrix, rows, of_columns).astype(np.float32)[:, column]
    else:
        wide -= np.float32(1 << (method.bits - 1))
    wide *= matrix.scales("weight_scale", of_rows, of_columns)[row][:, column]
    return wide


def packed_numbers(matrix: StoredMatrix, rows: slice, columns: slice) -> NDArray[np.uint8]:
    """Unpack uint8[n,k], the numbers of some rows and columns, of the layout "packed"."""
    words, inside = _within(columns, 32 // matrix.method.bits)
    numbers = unpacked(matrix.integers("weight_packed")[rows, words], matrix.method.bits)
    return numbers.reshape(len(numbers), -1)[:, inside]


def packed_zeros(matrix: StoredMatrix, rows: slice, of_columns: slice) -> NDArray[np.uint8]:
    """Unpack uint8[n,groups], the zero points of some rows and groups of columns, of "packed"."""
    words, inside = _within(rows, 32 // matrix.method.bits)
    zeros = matrix.integers("weight_zero_point")[words, of_columns]
    packed = unpacked(zeros, matrix.method.bits)
    return packed.swapaxes(1, 2).reshape(-1, packed.shape[1])[inside]


_Parts = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _of_gptq(matrix: StoredMatrix, rows: slice, columns: slice) -> Floats:
    numbers, zeros = gptq_parts(matrix, rows, columns)
    return _grouped(matrix, numbers.astype(np.float32), zeros, rows, columns)


def gptq_parts(matrix: StoredMatrix, rows: slice, columns: slice) -> _Parts:
    """Unpack GPTQ's layout: numbers uint8[n,k] and zero points uint8[groups,n]."""
    method, each = matrix.method, 32 // matrix.method.bits
    words, inside = _within(columns, each)
    numbers = unpacked(matrix.integers("qweight")[words, rows], method.bits)
    wide = numbers.transpose(1, 0, 2).reshape(numbers.shape[1], -1)[:, inside]
    words, inside = _within(rows, each)
    zeros = unpacked(matrix.integers("qzeros")[:, words], method.bits)
    zeros = zeros.reshape(len(zeros), -1)[:, inside]
    if method.minus_one:
        zeros = zeros + np.uint8(1) & np.uint8((1 << method.bits) - 1)
    return wide, zeros


def _of_awq(matrix: StoredMatrix, rows: slice, columns: slice) -> Floats:
    numbers, zeros = awq_parts(matrix, rows, columns)
    return _grouped(matrix, numbers.astype(np.float32), zeros, rows, columns)


def awq_parts(matrix: StoredMatrix, rows: slice, columns: slice) -> _Parts:
    """Unpack AWQ's layout: numbers uint8[n,k] and zero points uint8[groups,n]."""
    words, inside = _within(rows, 8)

    def numbers(part: str, lines: slice) -> NDArray[np.uint8]:
        found = unpacked(matrix.integers(part)[lines, words], 4)[..., list(_AWQ_PLACES)]
        return found.reshape(len(found), -1)[:, inside]

    return np.ascontiguousarray(numbers("qweight", columns).T), numbers("qzeros", _ALL)


def _grouped(
    matrix: StoredMatrix,
    numbers: Floats,
    zeros: NDArray[np.uint8],
    rows: slice,
    columns: slice,
) -> Floats:
    """Return float32[n,k] from numbers q [n,k] and zeros [groups,n] by GPTQ's and AWQ's rule."""
    scales = matrix.scales("scales", _ALL, rows)
    if "g_idx" in matrix.parts:
        groups = column_groups(matrix, "g_idx", len(scales))[columns]
    elif matrix.method.group:
        groups = np.arange(columns.start, columns.stop) // matrix.method.group
    else:
        groups = np.zeros(columns.stop - columns.start, np.intp)
    numbers -= zeros.T[:, groups]
    numbers *= scales.T[:, groups]
    return numbers


def column_groups(matrix: StoredMatrix, part: str, count: int) -> AnyArray:
    """Return int[K], each column's group. Raises ModelError if one is not within 0 .. count-1."""
    groups = matrix.integers(part)
    if groups.min() < 0 or groups.max() >= count:
        raise ModelError(
            f"{matrix.name}.{part} names groups {int(groups.min())} to {int(groups.max())}; there "
            f"are {count}"
        )
    return groups


_WIDEN: dict[Layout, Callable[[StoredMatrix, slice, slice], Floats]] = {
    "float8": _of_float8,
    "int8": _of_int8,
    "packed": _of_packed,
    "gptq": _of_gptq,
    "awq": _of_awq,
}
