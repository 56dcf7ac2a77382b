"""ggml's storage types: their sizes, and the conversion of their numbers to floats.

The table is that of the gguf package (tests/models/test_ggml.py compares them). The package is
imported only when numbers are converted: most models need no conversion, and it takes 5 MB and 50
ms of each process.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.types import Floats


class StorageType(NamedTuple):
    """A storage type: its number in files, elements per block, and bytes per block."""

    number: int
    block: int
    size: int


STORAGE = {
    "F32": StorageType(0, 1, 4),
    "F16": StorageType(1, 1, 2),
    "Q4_0": StorageType(2, 32, 18),
    "Q4_1": StorageType(3, 32, 20),
    "Q5_0": StorageType(6, 32, 22),
    "Q5_1": StorageType(7, 32, 24),
    "Q8_0": StorageType(8, 32, 34),
    "Q8_1": StorageType(9, 32, 40),
    "Q2_K": StorageType(10, 256, 84),
    "Q3_K": StorageType(11, 256, 110),
    "Q4_K": StorageType(12, 256, 144),
    "Q5_K": StorageType(13, 256, 176),
    "Q6_K": StorageType(14, 256, 210),
    "Q8_K": StorageType(15, 256, 292),
    "IQ2_XXS": StorageType(16, 256, 66),
    "IQ2_XS": StorageType(17, 256, 74),
    "IQ3_XXS": StorageType(18, 256, 98),
    "IQ1_S": StorageType(19, 256, 50),
    "IQ4_NL": StorageType(20, 32, 18),
    "IQ3_S": StorageType(21, 256, 110),
    "IQ2_S": StorageType(22, 256, 82),
    "IQ4_XS": StorageType(23, 256, 136),
    "I8": StorageType(24, 1, 1),
    "I16": StorageType(25, 1, 2),
    "I32": StorageType(26, 1, 4),
    "I64": StorageType(27, 1, 8),
    "F64": StorageType(28, 1, 8),
    "IQ1_M": StorageType(29, 256, 56),
    "BF16": StorageType(30, 1, 2),
    "TQ1_0": StorageType(34, 256, 54),
    "TQ2_0": StorageType(35, 256, 66),
    "MXFP4": StorageType(39, 32, 17),
    "NVFP4": StorageType(40, 64, 36),
    "Q1_0": StorageType(41, 128, 18),
    "Q2_0": StorageType(42, 64, 18),
}
"""By ggml's name."""

UNREADABLE = frozenset(("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"))
"""Types that cannot be converted: those of activations, and integers."""
_LEVELS = {"Q1_0": (1, np.array([-1, 1], np.float32)), "Q2_0": (2, np.arange(-1, 3, dtype="f4"))}
"""Type -> (bits of a number, lowest first after the block's scale; the values they encode). The
gguf package does not convert these.
"""

NAMES = {storage.number: name for name, storage in STORAGE.items()}
"""Names of storage types by their numbers in files."""


def floats_of(kind: str, rows: NDArray[np.uint8]) -> Floats:
    """Convert rows uint8[n,bytes of a row], contiguous, of a readable type to float32[n,K]."""
    if kind == "F16":
        return rows.view("<f2").astype(np.float32)
    if kind in _LEVELS:
        bits, levels = _LEVELS[kind]
        blocks = rows.reshape(-1, STORAGE[kind].size)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        codes = blocks[:, 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (len(levels) - 1)
        values: Floats = levels[codes].reshape(len(blocks), -1) * scales
        return values.reshape(len(rows), -1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        numbers: Floats = dequantize(rows, GGMLQuantizationType[kind])
    return numbers


@cache
def grid_of(kind: str) -> NDArray[np.int64]:
    """Return the codebook of an IQ1, IQ2 or IQ3 type, int64[entries, 4 or 8], without signs."""
    from gguf import quants

    codes = getattr(quants, kind)
    codes.init_grid()
    grid: NDArray[np.int64] = codes.grid.reshape(codes.grid_shape).astype(np.int64)
    return grid


@cache
def signs_by_seven() -> NDArray[np.uint8]:
    """Return uint8[128]: the signs of eight numbers, a bit each, by those of the first seven."""
    from gguf.quants import IQ2_XXS

    return np.frombuffer(IQ2_XXS.ksigns, np.uint8)
