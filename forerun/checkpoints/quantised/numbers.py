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


def _exponents() -> Floats:
    """Return float32[256], the value of each byte of E8M0 (OCP Microscaling 1.0, section 5.4.1)."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = {"float8": _float8_numbers(), "fp4": np.concatenate([_FP4, -_FP4])}
"""What numbers mean, by `Method.numbers`: float32[256] of E4M3, float32[16] of E2M1 (section 5.3.3
there). Integers mean themselves.
"""
_SCALES = {"F8_E4M3": VALUES["float8"], "E4M3": VALUES["float8"], "E8M0": _exponents()}


def widened(flat: NDArray[np.uint8], kind: str) -> Floats:
    """Convert bytes uint8[.] of elements of a float type, F32, F16, BF16, F8_E4M3, E4M3 or E8M0, to
    float32[n]. Raises KeyError for another type.
    """
    if kind == "BF16":
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind in _SCALES:
        return _SCALES[kind][flat]
    return flat.view({"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)


def unpacked(words: AnyArray, bits: int) -> NDArray[np.uint8]:
    """Unpack uint8[...,n], the n = 32 / bits numbers of each word, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = words.astype("<i4", copy=False).view("<u4")[..., None] >> shifts
    return (numbers & np.uint32((1 << bits) - 1)).astype(np.uint8)


def streamed(octets: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unpack uint8[n,m], numbers of 2 to 8 bits one after another in each row uint8[n,bytes], the
    lowest bits first.
    """
    if bits == 8:
        return octets
    if bits in (2, 4):
        each, mask = 8 // bits, np.uint8((1 << bits) - 1)
        numbers = np.empty((len(octets), each * octets.shape[1]), np.uint8)
        for place in range(each):
            numbers[:, place::each] = octets >> np.uint8(bits * place) & mask
        return numbers
    count = octets.shape[1] * 8 // bits
    places = bits * np.arange(count)
    wide = np.pad(octets, [(0, 0), (0, 1)]).astype(np.uint16)
    first = places // 8
    pairs = wide[:, first] | wide[:, first + 1] << 8
    return (pairs >> (places % 8).astype(np.uint16) & ((1 << bits) - 1)).astype(np.uint8)
