"""Matrices of 4-bit integers as they are stored (GPTQ, AWQ, pack-quantized), not widened."""

import numpy as np
from numpy.typing import NDArray

from forerun.models.mapped import FourBits
from forerun.models.quantised.matrices import (
    StoredMatrix,
    awq_parts,
    gptq_parts,
    packed_numbers,
    packed_zeros,
)
from forerun.types import Floats

_ORDERS = ("g_idx", "weight_g_idx")
"""Tensors that say which group a column belongs to."""


def four_bit_group(matrix: StoredMatrix) -> int:
    """Columns that share a scale and a zero point; 0 if they are not 4 bits, not whole groups in
    the columns' order, or where a scale is not a finite half.
    """
    method, columns = matrix.method, matrix.shape[1]
    group = method.group or columns
    if method.bits != 4 or method.layout not in ("gptq", "awq", "packed") or method.rows != 1:
        return 0
    if columns % group or (method.group and not _in_order(matrix, group)):
        return 0
    scales = _scales(matrix)
    return group if np.array_equal(scales, _halves(scales)) else 0


def four_bits(matrix: StoredMatrix) -> FourBits:
    """Return the matrix as numbers, scales and zeros; only if `four_bit_group` is not 0."""
    rows, columns = (slice(0, size) for size in matrix.shape)
    scales = _halves(_scales(matrix))
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


def _scales(matrix: StoredMatrix) -> Floats:
    """float32[N,groups]"""
    if matrix.method.layout == "packed":
        return matrix.scales("weight_scale")
    return np.ascontiguousarray(matrix.scales("scales").T)


def _halves(scales: Floats) -> NDArray[np.float16]:
    """Convert to float16: too large numbers become infinite, and NaN stays NaN, which equals
    nothing.
    """
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(scales.astype(np.float16))
