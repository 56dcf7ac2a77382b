"""Converts quantised elements to wider types."""

import numpy as np
from numpy.typing import NDArray

from forerun.types import AnyArray, Floats


def _float8_numbers() -> Floats:
    """Return float32[256], the value of each byte of float8 E4M3 (arXiv 2209.05433, table 1)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float32)
    small = np.float32(2.0**-9) * mantissa
    large = (1 + mantissa / 8) * np.exp2(exponent.astype(np.float32) - 7)
    numbers = np.where(exponent == 0, small, large)
    numbers[code & 127 == 127] = np.nan
    return np.where(code & 128, -numbers, numbers).astype(np.float32)


_FLOAT8 = _float8_numbers()


def widened(flat: NDArray[np.uint8], kind: str) -> Floats:
    """Convert bytes uint8[.] of elements of a float type, F32, F16, BF16 or F8_E4M3, to float32[n].
    Raises KeyError for another type.
    """
    if kind == "BF16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_E4M3":
        return _FLOAT8[flat]
    return flat.view({"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)


def unpacked(words: AnyArray, bits: int) -> NDArray[np.uint8]:
    """Unpack uint8[...,n], the n = 32 / bits numbers of each word, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = words.astype("<i4", copy=False).view("<u4")[..., None] >> shifts
    return (numbers & np.uint32((1 << bits) - 1)).astype(np.uint8)
