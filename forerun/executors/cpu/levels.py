"""Converts ggml's codebook and ternary types to rows that the compiled core packs.

A block of a codebook type has few different numbers, which its scales multiply: they become places
in a table (csrc/quant.h, `kFileLevels16`), of four bits each, or of three in the core if at most
eight are different. The numbers stay exactly those of the file.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.checkpoints.ggml import STORAGE, floats_of

Bytes = NDArray[np.uint8]

_IQ1 = (-9, -7, -1, 1, 7, 9)
_IQ2 = (-43, -25, -8, 8, 25, 43)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
LEVELS = {
    "IQ1_S": _IQ1,
    "IQ1_M": _IQ1,
    "IQ2_XXS": _IQ2,
    "IQ2_XS": _IQ2,
    "IQ2_S": _IQ2,
    "IQ3_XXS": (*(-level for level in _IQ3_XXS), *_IQ3_XXS),
    "IQ3_S": tuple(range(-15, 16, 2)),
}
"""Codebook type -> the numbers of its blocks before scaling, as integers."""
TERNARY = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""Types of one scale for each block and numbers from -2 to 2."""
_UNITS = {"IQ3_XXS": 0.25, "IQ3_S": 1.0}
"""What scales multiply beside their integers; .125 in the other types."""
_BLOCKS_AT_ONCE = 1 << 15
_ROW = 166
_ONE = np.frombuffer(np.float16(1).tobytes(), np.uint8)


class _Scales(NamedTuple):
    """A block's scales: `halves` float16[n], and integers uint8[n,16] for 16 numbers each."""

    halves: NDArray[np.float16]
    integers: Bytes


def _halves(blocks: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0]


def _words(blocks: Bytes, at: int, count: int, kind: str) -> NDArray[np.uint32]:
    """Return `count` integers of numpy type `kind` of each block from byte `at` on."""
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + size * count]).view(kind).astype(np.uint32)


def _take_scales(kind: str, blocks: Bytes) -> _Scales:
    """Return the scales of blocks uint8[n,bytes], and replace them there by 1."""
    if kind == "IQ1_M":
        words = _words(blocks, 48, 4, "<u2")
        half = words >> 12 << np.array([0, 4, 8, 12], np.uint32)
        halves = half.sum(-1).astype("<u2").view("<f2")
        small = (words[..., None] >> np.array([0, 3, 6, 9], np.uint32) & 7).reshape(-1, 16)
        blocks[:, 48:] = np.array([0, 0, 0xC000, 0x3000], "<u2").view(np.uint8)
        return _Scales(halves, (2 * small + 1).astype(np.uint8))
    halves = _halves(blocks)
    blocks[:, :2] = _ONE
    if kind in ("IQ2_XS", "IQ2_S"):
        nibbles = blocks[:, -8:, None] >> np.array([0, 4], np.uint8) & 15
        blocks[:, -8:] = 0
        return _Scales(halves, (2 * nibbles.reshape(-1, 16) + 1).astype(np.uint8))
    if kind == "IQ3_S":
        small = (blocks[:, -4:, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
        blocks[:, -4:] = 0
    elif kind == "IQ1_S":
        small = _words(blocks, 34, 8, "<u2") >> 12 & 7
        blocks[:, 35::2] &= 0x8F
    else:  # The highest four of 32 bits, of which IQ2_XXS has 32 others between.
        first, step = (2 + 7, 8) if kind == "IQ2_XXS" else (66 + 3, 4)
        small = blocks[:, first::step] >> 4
        blocks[:, first::step] &= 15
    return _Scales(halves, np.repeat(2 * small + 1, 2, 1).astype(np.uint8))


def _slabs(rows: Bytes, size: int) -> Iterator[tuple[slice, Bytes]]:
    """Yield (where they lie, some blocks of `size` bytes, copied) until all are yielded."""
    blocks = rows.reshape(-1, size)
    for at in range(0, len(blocks), _BLOCKS_AT_ONCE):
        where = slice(at, min(at + _BLOCKS_AT_ONCE, len(blocks)))
        yield where, blocks[where].copy()


def _pairs(places: Bytes) -> Bytes:
    """Pack places uint8[n,256] into uint8[n,128]: of each 32 the first 16 in the low nibbles."""
    groups = places.reshape(len(places), -1, 2, 16)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).astype(np.uint8).reshape(len(places), -1)


def rows_of_levels(kind: str, rows: Bytes) -> Bytes:
    """Convert rows uint8[n,bytes] of a codebook type of K numbers to `kFileLevels16` or
    `kFileLevels8`: uint8[n, 166 * K / 256].
    """
    levels, unit = np.array(LEVELS[kind], np.int8), np.float32(_UNITS.get(kind, 0.125))
    place_of = np.zeros(256, np.uint8)
    place_of[levels.view(np.uint8)] = np.arange(len(levels), dtype=np.uint8)
    size = STORAGE[kind].size
    made = np.zeros((rows.size // size, _ROW), np.uint8)
    made[:, 2:6] = np.frombuffer(unit.tobytes(), np.uint8)
    made[:, 6 : 6 + len(levels)] = levels.view(np.uint8)
    for where, blocks in _slabs(rows, size):
        halves, made[where, 22:38] = _take_scales(kind, blocks)
        made[where, :2] = halves[:, None].view(np.uint8)
        numbers = floats_of(kind, blocks) / unit
        made[where, 38:] = _pairs(place_of[numbers.astype(np.int8).view(np.uint8)])
    return made.reshape(len(rows), -1)


def rows_of_q4_0(kind: str, rows: Bytes) -> Bytes:
    """Convert rows uint8[n,bytes] of a ternary type of K numbers to Q4_0: uint8[n, 18 * K / 32]."""
    storage = STORAGE[kind]
    groups, at = storage.block // 32, -2 if kind.startswith("T") else 0
    made = np.empty((rows.size // storage.size, groups, 18), np.uint8)
    for where, blocks in _slabs(rows, storage.size):
        scale = slice(at, at + 2 or None)
        made[where, :, :2] = blocks[:, None, scale]
        blocks[:, scale] = _ONE
        numbers = floats_of(kind, blocks).astype(np.int8) + np.int8(8)
        made[where, :, 2:] = _pairs(numbers.view(np.uint8)).reshape(len(blocks), groups, 16)
    return made.reshape(len(rows), -1)
