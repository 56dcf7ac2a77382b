"""Matrices of quantised folders that stay quantised: as grouped.Grouped, and those of 4-bit
integers (GPTQ, AWQ, pack-quantized) as mapped.FourBits.
"""

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.grouped import Grouped, GroupedKind, GroupedRows, check_float8
from forerun.checkpoints.mapped import FourBits
from forerun.checkpoints.quantised.matrices import (
    StoredMatrix,
    awq_parts,
    column_groups,
    gptq_parts,
    packed_numbers,
    packed_zeros,
)
from forerun.types import AnyArray, Floats, Ints

_ALL = slice(None)
_ORDERS = ("g_idx", "weight_g_idx")
"""Tensors with the group of each column."""
_SCALES = ("weight_scale", "weight_scale_inv", "scales")


def grouped(matrix: StoredMatrix) -> Grouped | None:
    """Return the matrix by group; None if its numbers are neither 4-bit nor 8-bit, or groups have
    different numbers of columns. Raises ModelError for a group that does not exist.
    """
    method, columns = matrix.method, matrix.shape[1]
    if method.layout == "mxfp4" or method.bits not in (4, 8):
        return None
    group = min(method.group or columns, columns)
    order: Ints | None = None
    named = next((name for name in _ORDERS if name in matrix.parts), None)
    if named is not None and method.group:
        groups = column_groups(matrix, named, -(-columns // group))
        if not np.array_equal(groups, np.arange(columns) // group):
            order = np.argsort(groups, kind="stable").astype(np.int32)
            if not np.array_equal(groups[order], np.arange(columns) // group):
                return None
    kind: GroupedKind = "int4" if method.bits == 4 else "int8"
    scale = next(name for name in _SCALES if name in matrix.parts)
    file, stored = matrix.parts[scale]
    return Grouped(
        kind="float8" if method.layout == "float8" else kind,
        shape=matrix.shape,
        group=group,
        zeros=bool({"qzeros", "weight_zero_point"} & matrix.parts.keys()),
        scale=file.tensors[stored].kind,
        order=order,
        read=lambda rows: _rows(matrix, rows, order),
    )


def _rows(matrix: StoredMatrix, rows: slice, order: Ints | None) -> GroupedRows:
    first, last, _ = rows.indices(matrix.shape[0])
    numbers, scales, zeros = _READ[matrix.method.layout](matrix, slice(first, last))
    scales = np.broadcast_to(scales, (last - first, scales.shape[1]))
    if zeros is not None:
        zeros = np.broadcast_to(zeros, scales.shape)
    return GroupedRows(numbers if order is None else numbers[:, order], scales, zeros)


_Parts = tuple[AnyArray, Floats, AnyArray | None]


def _of_gptq(matrix: StoredMatrix, rows: slice) -> _Parts:
    parts = gptq_parts if matrix.method.layout == "gptq" else awq_parts
    numbers, zeros = parts(matrix, rows, slice(0, matrix.shape[1]))
    scales = matrix.scales("scales", _ALL, rows).T
    return _signed(matrix, numbers), scales, _signed(matrix, zeros.T)


def _of_packed(matrix: StoredMatrix, rows: slice) -> _Parts:
    numbers = _signed(matrix, packed_numbers(matrix, rows, slice(0, matrix.shape[1])))
    zeros = _signed(matrix, packed_zeros(matrix, rows, _ALL)) if matrix.method.zeros else None
    return numbers, _scales(matrix, "weight_scale", rows), zeros


def _of_int8(matrix: StoredMatrix, rows: slice) -> _Parts:
    zeros = None
    if "weight_zero_point" in matrix.parts:
        zeros = _scales(matrix, "weight_zero_point", rows).astype(np.int8)
    return matrix.integers("weight")[rows], _scales(matrix, "weight_scale", rows), zeros


def _of_float8(matrix: StoredMatrix, rows: slice) -> _Parts:
    file, stored = matrix.parts["weight"]
    there = file.tensors[stored]
    flat = file.data[there.start : there.start + there.size].reshape(matrix.shape)
    check_float8(flat[rows], f"{matrix.name}.weight")
    name = next(name for name in _SCALES if name in matrix.parts)
    return flat[rows], _scales(matrix, name, rows), None


def _scales(matrix: StoredMatrix, part: str, rows: slice) -> Floats:
    """Return float32[n,groups], the scales or zero points of rows that share them in blocks."""
    each = matrix.method.rows
    block = np.arange(rows.start, rows.stop) // each if each else np.zeros(1, np.intp)
    first, last = int(block[0]), int(block[-1]) + 1
    file, stored = matrix.parts[part]
    if file.tensors[stored].kind == "I8":
        whole = matrix.integers(part)
        scales: Floats = whole.reshape(len(whole), -1)[first:last].astype(np.float32)
    else:
        scales = matrix.scales(part, slice(first, last))
    shared: Floats = scales[block - first]
    return shared


def _signed(matrix: StoredMatrix, numbers: AnyArray) -> AnyArray:
    """Return 8-bit integers from 0 to 255 as int8, less 128; 4-bit ones unchanged."""
    return numbers if matrix.method.bits == 4 else (numbers ^ np.uint8(128)).view(np.int8)


_READ = {
    "gptq": _of_gptq,
    "awq": _of_gptq,
    "packed": _of_packed,
    "int8": _of_int8,
    "float8": _of_float8,
}


def four_bit_group(matrix: StoredMatrix) -> int:
    """Return how many columns share a scale and a zero point; 0 if the matrix is not of 4 bits in
    whole groups in the columns' order, or a scale is not a finite float16.
    """
    method, columns = matrix.method, matrix.shape[1]
    group = method.group or columns
    if method.bits != 4 or method.layout not in ("gptq", "awq", "packed") or method.rows != 1:
        return 0
    if columns % group or (method.group and not _in_order(matrix, group)):
        return 0
    scales = _scales_of(matrix)
    return group if np.array_equal(scales, _halves(scales)) else 0


def four_bits(matrix: StoredMatrix) -> FourBits:
    """Return the matrix as numbers, scales and zeros; only if `four_bit_group` is not 0."""
    rows, columns = (slice(0, size) for size in matrix.shape)
    scales = _halves(_scales_of(matrix))
    if matrix.method.layout == "packed":
        numbers = packed_numbers(matrix, rows, columns)
        if not matrix.method.zeros:
            return FourBits(numbers, scales, np.full(scales.shape, 8, np.uint8))
        return FourBits(numbers, scales, packed_zeros(matrix, rows, slice(None)))
    parts = gptq_parts if matrix.method.layout == "gptq" else awq_parts
    numbers, zeros = parts(matrix, rows, columns)
    return FourBits(np.ascontiguousarray(numbers), scales, zeros.T)


def _in_order(matrix: StoredMatrix, group: int) -> bool:
    expected = np.arange(matrix.shape[1]) // group
    orders = (matrix.integers(name) for name in _ORDERS if name in matrix.parts)
    return all(np.array_equal(order, expected) for order in orders)


def _scales_of(matrix: StoredMatrix) -> Floats:
    """Return the scales float32[N,groups]."""
    if matrix.method.layout == "packed":
        return matrix.scales("weight_scale")
    return np.ascontiguousarray(matrix.scales("scales").T)


def _halves(scales: Floats) -> NDArray[np.float16]:
    """Convert to float16. Numbers that are too large become infinite, and NaN stays NaN, which is
    not equal to anything.
    """
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(scales.astype(np.float16))
