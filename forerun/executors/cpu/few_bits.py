"""Converts matrices of few bits to rows that the compiled core packs (csrc/quant.h, `Source`)."""

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.mapped import FourBits
from forerun.errors import ModelError

TILE = 128
"""Inputs per tile of the core's format `kQ4Z`, which share a scale and a zero point."""
_GROUP = 32


def rows_of_tiles(matrix: FourBits) -> NDArray[np.uint8]:
    """Convert a 4-bit matrix, whose group must be a multiple of 128 inputs, to the core's format
    `kQ4Z`.

    Returns uint8[rows, 68 * inputs / 128]; each 68 bytes are a float16 scale, a uint8 zero point,
    an unused byte, and 128 4-bit numbers in the order of Q4_0.
    """
    rows, inputs = matrix.numbers.shape
    packed = np.zeros((rows, inputs // TILE, 68), np.uint8)
    repeat = matrix.group // TILE
    scales = np.repeat(matrix.scales, repeat, 1)
    packed[..., :2] = scales[..., None].view(np.uint8)
    packed[..., 2] = np.repeat(matrix.zeros, repeat, 1)
    halves = matrix.numbers.reshape(rows, inputs // TILE, TILE // _GROUP, 2, _GROUP // 2)
    packed[..., 4:] = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(rows, -1, 64)
    return packed.reshape(rows, -1)


def rows_of_bytes(matrix: FourBits) -> NDArray[np.uint8]:
    """Convert a 4-bit matrix, whose group must be a multiple of 32 inputs, to Q8_0 with the same
    values.

    Returns uint8[rows, 34 * inputs / 32]; each 34 bytes are a float16 scale and 32 int8 numbers.
    """
    rows, inputs = matrix.numbers.shape
    repeat = matrix.group // _GROUP
    packed = np.empty((rows, inputs // _GROUP, 34), np.uint8)
    packed[..., :2] = np.repeat(matrix.scales, repeat, 1)[..., None].view(np.uint8)
    zeros = np.repeat(matrix.zeros, matrix.group, 1)
    packed[..., 2:] = (matrix.numbers - zeros).reshape(rows, -1, _GROUP)
    return packed.reshape(rows, -1)


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
