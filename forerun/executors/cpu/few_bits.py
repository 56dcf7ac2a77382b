"""Converts matrices of few bits to rows that the compiled core packs (csrc/quant.h, `Source`)."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.grouped import MIDDLE, Grouped, GroupedRows
from forerun.errors import ModelError
from forerun.types import AnyArray

TILE = 128
"""Inputs per tile of the core's format `kQ4Z`, which share a scale and a zero point."""
_GROUP = 32
ROUNDED = ", some scales rounded"
"""The end of the name of a format whose scales, in the core float16, are not all exact."""
INTEGERS = "4-bit integers"
"""One scale and zero point for 128 inputs, or a multiple of that (GPTQ, AWQ)."""
SMALL = "4-bit integers in groups below 128"
"""Stored as 8 bits with the same values."""
WITH_OFFSETS = "4-bit integers with offsets", "5-bit integers with offsets"
"""The core's Q4_1 and Q5_1 (MLX)."""
FEW_BITS = {INTEGERS: INTEGERS, SMALL: "Q8_0", "MXFP4": "MXFP4"}
FEW_BITS |= {WITH_OFFSETS[0]: "Q4_1", WITH_OFFSETS[1]: "Q5_1"}
"""Name -> the core's source."""


def kind_of(matrix: Grouped | None) -> str:
    """Return the name of the format in which the core keeps a matrix, a key of FEW_BITS, possibly
    with ROUNDED; "few bits" if it has none.
    """
    if matrix is None or matrix.order is not None:
        return "few bits"
    if matrix.group % _GROUP or matrix.shape[1] % matrix.group:
        return "few bits"
    if matrix.kind == "mxfp4":
        return "MXFP4"
    if matrix.kind not in ("int4", "int5") or (halves := matrix.halves()) is None:
        return "few bits"
    if matrix.offsets:
        kind = WITH_OFFSETS[matrix.kind == "int5"]
    else:
        kind = SMALL if matrix.group % TILE else INTEGERS
    return kind if halves else kind + ROUNDED


def _halves(part: AnyArray | None, repeat: int) -> NDArray[np.uint8]:
    """Return uint8[rows,groups*repeat,2], a number of each group as float16, `repeat` times."""
    assert part is not None
    return np.repeat(part.astype(np.float16), repeat, 1)[..., None].view(np.uint8)


def _nibbles(numbers: AnyArray) -> NDArray[np.uint8]:
    """Pack [rows,inputs] into uint8[rows,inputs/32,16] in the order of Q4_0."""
    halves = numbers.reshape(len(numbers), -1, 2, _GROUP // 2)
    packed: NDArray[np.uint8] = np.bitwise_or(halves[..., 0, :] & 15, halves[..., 1, :] << 4)
    return packed


def _zeros(parts: GroupedRows) -> AnyArray:
    return np.full(parts.scales.shape, MIDDLE, np.uint8) if parts.zeros is None else parts.zeros


def rows_of_tiles(parts: GroupedRows) -> NDArray[np.uint8]:
    """Convert a 4-bit matrix, whose group must be a multiple of 128 inputs, to the core's format
    `kQ4Z`.

    Returns uint8[rows, 68 * inputs / 128]; each 68 bytes are a float16 scale, a uint8 zero point,
    an unused byte, and 128 4-bit numbers in the order of Q4_0.
    """
    rows, inputs = parts.numbers.shape
    packed = np.zeros((rows, inputs // TILE, 68), np.uint8)
    repeat = inputs // TILE // parts.scales.shape[1]
    packed[..., :2] = _halves(parts.scales, repeat)
    packed[..., 2] = np.repeat(_zeros(parts), repeat, 1)
    packed[..., 4:] = _nibbles(parts.numbers).reshape(rows, -1, 64)
    return packed.reshape(rows, -1)


def rows_of_bytes(parts: GroupedRows) -> NDArray[np.uint8]:
    """Convert a 4-bit matrix, whose group must be a multiple of 32 inputs, to Q8_0 with the same
    values.

    Returns uint8[rows, 34 * inputs / 32]; each 34 bytes are a float16 scale and 32 int8 numbers.
    """
    rows, inputs = parts.numbers.shape
    groups = parts.scales.shape[1]
    packed = np.empty((rows, inputs // _GROUP, 34), np.uint8)
    packed[..., :2] = _halves(parts.scales, inputs // _GROUP // groups)
    zeros = np.repeat(_zeros(parts), inputs // groups, 1)
    packed[..., 2:] = (parts.numbers - zeros).reshape(rows, -1, _GROUP)
    return packed.reshape(rows, -1)


def rows_with_offsets(bits: int, parts: GroupedRows) -> NDArray[np.uint8]:
    """Convert a matrix of 4-bit or 5-bit integers with offsets to Q4_1 or Q5_1 of ggml."""
    rows, inputs = parts.numbers.shape
    repeat = inputs // _GROUP // parts.scales.shape[1]
    fields = [_halves(parts.scales, repeat), _halves(parts.offsets, repeat)]
    if bits == 5:
        fifths = np.packbits(parts.numbers >> 4, -1, bitorder="little")
        fields.append(fifths.reshape(rows, -1, 4))
    fields.append(_nibbles(parts.numbers))
    return np.concatenate(fields, -1).reshape(rows, -1)


def rows_of_fp4(parts: GroupedRows) -> NDArray[np.uint8]:
    """Convert a matrix of E2M1 with powers of two as scales to MXFP4 of ggml. Scales of zeros
    become 1.
    """
    exponents = (np.frexp(parts.scales)[1] + 126).astype(np.uint8)
    exponents[~(parts.numbers & 7).reshape(*exponents.shape, -1).any(-1)] = 127
    rows = np.concatenate([exponents[..., None], _nibbles(parts.numbers)], -1)
    return rows.reshape(len(rows), -1)


_ROWS: dict[str, Callable[[GroupedRows], NDArray[np.uint8]]] = {
    INTEGERS: rows_of_tiles,
    SMALL: rows_of_bytes,
    WITH_OFFSETS[0]: partial(rows_with_offsets, 4),
    WITH_OFFSETS[1]: partial(rows_with_offsets, 5),
    "MXFP4": rows_of_fp4,
}


def source_rows(kind: str, matrix: Grouped) -> tuple[str, NDArray[np.uint8]]:
    """Return (the core's source, uint8[rows,bytes]) of a matrix for which `kind_of` is `kind`."""
    kind = kind.removesuffix(ROUNDED)
    parts = matrix.read(slice(0, matrix.shape[0]))
    return FEW_BITS[kind], _ROWS[kind](parts)


def check_fp4(rows: NDArray[np.uint8], name: str) -> None:
    """Raise ModelError, naming the tensor, if a scale of MXFP4 rows uint8[rows,bytes], 2^(byte -
    127), does not fit the float16 in which the core stores it.
    """
    exponents = rows.reshape(len(rows), -1, 17)[..., 0]
    # The core stores the numbers doubled and the scale halved, as a float16.
    if exponents.min() < 128 - 24 or exponents.max() > 128 + 15:
        raise ModelError(
            f"{name}: a scale of MXFP4 is beyond the range of 16-bit floats, in which the compiled "
            "core stores it; use the torch executor (--executor torch)"
        )
