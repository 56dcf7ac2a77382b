"""Converts ggml's codebook and ternary types to rows that the compiled core packs.

A block of a codebook type has few different numbers, which its scales multiply: they become places
in a table (csrc/quant.h, `kFileLevels16`), of four bits each, or of three in the core if at most
eight are different. The numbers stay exactly those of the file.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.ggml import STORAGE, floats_of, grid_of, signs_by_seven

Bytes = NDArray[np.uint8]
Numbers = NDArray[Any]

_IQ1 = (-9, -7, -1, 1, 7, 9)
_IQ2 = (-43, -25, -8, 8, 25, 43)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
LEVELS = {
    "IQ1_S": _IQ1,
    "IQ1_M": _IQ1,
    "IQ2_XXS": _IQ2,
    "IQ2_XS": _IQ2,
    "IQ2_S": _IQ2,
    "IQ3_XXS": (*(-level for level in reversed(_IQ3_XXS)), *_IQ3_XXS),
    "IQ3_S": tuple(range(-15, 16, 2)),
}
"""Codebook type -> the numbers of its blocks before scaling, as integers in ascending order."""
TERNARY = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""Types of one scale for each block and numbers from -2 to 2."""
_UNITS = {"IQ3_XXS": 0.25, "IQ3_S": 1.0}
"""What scales multiply beside their integers; .125 in the other types."""
_BLOCKS_AT_ONCE = 1 << 12
_ROW = 166


class _Block(NamedTuple):
    """The parts of n blocks.

    halves  float16[n]
    scales  uint8[n,16], integers from 0 on for 16 numbers each, or uint8[n,8] for 32
    runs    int[n,64] or int[n,32]: of 4 or 8 numbers each, an index into the type's `_codebook`
    """

    halves: Numbers
    scales: Numbers
    runs: Numbers


def _words(blocks: Bytes, at: int, count: int, kind: str) -> Numbers:
    """Return `count` integers of NumPy type `kind` of each block from byte `at` on."""
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + size * count]).view(kind)


def _halves(blocks: Bytes) -> Numbers:
    return _words(blocks, 0, 1, "<f2")[:, 0]


def _fields(numbers: Numbers, width: int, count: int) -> Numbers:
    """Return `count` fields of `width` bits of each of int[n,k], lowest first: int[n,k*count]."""
    shifts = np.arange(0, width * count, width, dtype=numbers.dtype)
    fields: Numbers = numbers[..., None] >> shifts & numbers.dtype.type((1 << width) - 1)
    return fields.reshape(len(numbers), -1)


def _parts_of_iq1(kind: str, blocks: Bytes) -> _Block:
    if kind == "IQ1_M":
        words = _words(blocks, 48, 4, "<u2")
        nibbles = (words >> 12).astype(np.uint16) << np.array([0, 4, 8, 12], np.uint16)
        halves = nibbles.sum(-1, dtype=np.uint16).view("<f2")
        runs = blocks[:, :32] | _fields(blocks[:, 32:48], 4, 2).astype(np.uint16) << 8
        return _Block(halves, _fields(words, 3, 4), runs)
    words = _words(blocks, 34, 8, "<u2")
    delta = np.repeat(words >> 15, 4, 1)
    runs = blocks[:, 2:34] | _fields(words, 3, 4) << 8 | delta << 11
    return _Block(_halves(blocks), words >> 12 & 7, runs)


def _parts_of_iq2(kind: str, blocks: Bytes) -> _Block:
    if kind == "IQ2_XXS":
        words = _words(blocks, 2, 16, "<u4")[:, 1::2]
        low = blocks[:, 2:66].reshape(len(blocks), 8, 8)[..., :4].reshape(len(blocks), 32)
        return _Block(_halves(blocks), words >> 28, low | _fields(words, 7, 4) << 8)
    scales = _fields(blocks[:, -8:], 4, 2)
    if kind == "IQ2_XS":
        return _Block(_halves(blocks), scales, _words(blocks, 2, 32, "<u2"))
    high, signs = _fields(blocks[:, 66:74], 2, 4), blocks[:, 34:66]
    runs = blocks[:, 2:34] | high.astype(np.uint32) << 8 | signs.astype(np.uint32) << 10
    return _Block(_halves(blocks), scales, runs)


def _parts_of_iq3(kind: str, blocks: Bytes) -> _Block:
    if kind == "IQ3_XXS":
        words = _words(blocks, 66, 8, "<u4")
        signs = _fields(signs_by_seven()[_fields(words, 7, 4)], 4, 2).astype(np.uint16)
        return _Block(_halves(blocks), words >> 28, blocks[:, 2:66] | signs << 8)
    signs = _fields(blocks[:, 74:106], 4, 2).astype(np.uint16)
    runs = blocks[:, 2:66] | _fields(blocks[:, 66:74], 1, 8).astype(np.uint16) << 8 | signs << 9
    return _Block(_halves(blocks), _fields(blocks[:, 106:], 4, 2), runs)


_PARTS = {"IQ1": _parts_of_iq1, "IQ2": _parts_of_iq2, "IQ3": _parts_of_iq3}
"""Type's family -> the function that takes blocks uint8[n,bytes] apart (ggml's `block_iq*`)."""


@cache
def _codebook(kind: str) -> Numbers:
    """Return the places of each run, a byte for each of its 4 numbers uint32[.] or 8 uint64[.]."""
    grid = grid_of(kind)
    if kind.startswith("IQ1"):
        numbers = np.concatenate([8 * grid + 1, 8 * grid - 1])
    else:
        width = grid.shape[1]
        signs = (
            signs_by_seven()
            if kind in ("IQ2_XXS", "IQ2_XS")
            else np.arange(1 << width, dtype=np.uint8)
        )
        negative = (signs[:, None] >> np.arange(width) & 1).astype(bool)
        numbers = np.where(negative[:, None], -grid, grid).reshape(-1, width)
    places = np.searchsorted(LEVELS[kind], numbers).astype(np.uint8)
    runs: Numbers = places.view(f"<u{places.shape[1]}")[:, 0]
    return runs


def _slabs(rows: Bytes, size: int) -> Iterator[tuple[slice, Bytes]]:
    """Yield (where they lie, some blocks of `size` bytes) until all are yielded."""
    blocks = rows.reshape(-1, size)
    for at in range(0, len(blocks), _BLOCKS_AT_ONCE):
        where = slice(at, min(at + _BLOCKS_AT_ONCE, len(blocks)))
        yield where, blocks[where]


def _pairs(places: Bytes) -> Bytes:
    """Pack places uint8[n,256], which may be integers of more bytes, into uint8[n,128]: of each 32
    the first 16 in the low nibbles.
    """
    groups = places.reshape(len(places), -1, 2, 16 // places.itemsize)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).view(np.uint8).reshape(len(places), -1)


def rows_of_levels(kind: str, rows: Bytes) -> Bytes:
    """Convert rows uint8[n,bytes] of a codebook type of K numbers to `kFileLevels16` or
    `kFileLevels8`: uint8[n, 166 * K / 256].
    """
    levels, unit = np.array(LEVELS[kind], np.int8), np.float32(_UNITS.get(kind, 0.125))
    size = STORAGE[kind].size
    made = np.zeros((rows.size // size, _ROW), np.uint8)
    made[:, 2:6] = np.frombuffer(unit.tobytes(), np.uint8)
    made[:, 6 : 6 + len(levels)] = levels.view(np.uint8)
    for where, blocks in _slabs(rows, size):
        halves, scales, runs = _PARTS[kind[:3]](kind, blocks)
        made[where, :2] = halves[:, None].view(np.uint8)
        made[where, 22:38] = np.repeat(2 * scales + 1, 16 // scales.shape[1], 1)
        made[where, 38:] = _pairs(_codebook(kind)[runs])
    return made.reshape(len(rows), -1)


def rows_of_q4_0(kind: str, rows: Bytes) -> Bytes:
    """Convert rows uint8[n,bytes] of a ternary type of K numbers to Q4_0: uint8[n, 18 * K / 32]."""
    storage, one = STORAGE[kind], np.frombuffer(np.float16(1).tobytes(), np.uint8)
    groups, at = storage.block // 32, -2 if kind.startswith("T") else 0
    scale = slice(at, at + 2 or None)
    made = np.empty((rows.size // storage.size, groups, 18), np.uint8)
    for where, stored in _slabs(rows, storage.size):
        blocks = stored.copy()
        blocks[:, scale] = one
        numbers = floats_of(kind, blocks).astype(np.int8) + np.int8(8)
        made[where, :, :2] = stored[:, None, scale]
        made[where, :, 2:] = _pairs(numbers.view(np.uint8)).reshape(len(blocks), groups, 16)
    return made.reshape(len(rows), -1)
