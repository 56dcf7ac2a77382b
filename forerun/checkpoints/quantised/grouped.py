"""Matrices of quantised folders that stay quantised, as grouped.Grouped."""

import numpy as np

from forerun.checkpoints.grouped import Grouped, GroupedKind, GroupedRows, check_float8
from forerun.checkpoints.quantised.matrices import StoredMatrix
from forerun.checkpoints.quantised.method import Method
from forerun.types import Ints


def grouped(matrix: StoredMatrix) -> Grouped | None:
    """Return the matrix by group; None if no product reads its numbers, or groups have different
    numbers of columns. Raises ModelError for a group that does not exist.
    """
    method, columns = matrix.method, matrix.shape[1]
    kind = kind_of(method)
    if kind is None:
        return None
    group = min(method.group or columns, columns)
    order: Ints | None = None
    groups = matrix.order()
    if groups is not None:
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], np.arange(columns) // group):
            return None
    return Grouped(
        kind=kind,
        shape=matrix.shape,
        group=group,
        zeros=method.zeros,
        scale="F32" if method.scale else matrix.kind_of_scales(),
        order=order,
        read=lambda rows: _rows(matrix, rows, order),
        offsets=method.offsets,
        halves=matrix.halves,
    )


def kind_of(method: Method) -> GroupedKind | None:
    """Return what numbers a method stores, if any product reads them."""
    if method.numbers == "table":
        return None
    if method.numbers == "fp4":
        return "mxfp4" if method.scale == "E8M0" else None
    if method.numbers == "float8":
        return "float8"
    if method.offsets:
        return "int4" if method.bits <= 4 else "int5" if method.bits == 5 else None
    return "int4" if method.bits <= 4 else "int8"


def _rows(matrix: StoredMatrix, rows: slice, order: Ints | None) -> GroupedRows:
    rows = slice(*rows.indices(matrix.shape[0])[:2])
    numbers, shared = matrix.numbers(rows, slice(0, matrix.shape[1])), matrix.shared(rows)
    if matrix.method.numbers == "float8":
        check_float8(numbers, f"{matrix.name}.weight")
    shape = len(numbers), shared.scales.shape[1]
    scales = np.broadcast_to(shared.scales, shape)
    zeros = None if shared.zeros is None else np.broadcast_to(shared.zeros, shape)
    numbers = numbers if order is None else numbers[:, order]
    return GroupedRows(numbers, scales, zeros, shared.offsets)
