"""A keyed checksum of large records, several times faster than a cryptographic hash: NH, the first
layer of UMAC (RFC 4418), whose results are then hashed with a key.

A row of 512 numbers x of 32 bits has, with as many random numbers k, the sum over i of

    (x[i] + k[i] mod 2^32) (x[256 + i] + k[256 + i] mod 2^32)    mod 2^64.

Two different rows have the same sum for one of 2^32 keys k at most, so it detects damage, and also
changes made without knowledge of the secret. 184 MB take 31 ms of a core (EPYC with AVX-512),
CRC-32 of zlib 43, SHA-256 102, BLAKE2b 197.
"""

from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

ROW = 2048
"""Bytes of a row."""
ROWS = 128
"""Rows that are summed at a time, so that they stay in a core's own cache: 184 MB take 31 ms; with
16 rows 50, with 32 39, with 64 32, with 256 31.
"""


class RowSums:
    """Sums the rows of records. For one thread.

    secret  bytes from which the key k is derived
    """

    def __init__(self, secret: bytes) -> None:
        key = shake_256(b"rows of records" + secret).digest(ROW)
        self._key = np.frombuffer(key, "<u4").reshape(2, -1)
        self._mixed = np.empty((ROWS, *self._key.shape), np.uint32)
        self._products = np.empty((ROWS, self._key.shape[1]), np.uint64)

    def __call__(self, data: bytes | memoryview) -> bytes:
        """Return the sums of all rows of `data`, 8 little-endian bytes each; the last row is padded
        with 0.
        """
        numbers = np.frombuffer(data, np.uint8)
        full = len(numbers) // ROW * ROW
        sums = self._sums(numbers[:full])
        if full < len(numbers):
            last = np.zeros(ROW, np.uint8)
            last[: len(numbers) - full] = numbers[full:]
            sums = np.append(sums, self._sums(last))
        return sums.astype("<u8").tobytes()

    def _sums(self, numbers: NDArray[np.uint8]) -> NDArray[np.uint64]:
        rows = numbers.view("<u4").reshape(-1, *self._key.shape)
        sums = np.empty(len(rows), np.uint64)
        for begin in range(0, len(rows), ROWS):
            block = rows[begin : begin + ROWS]
            mixed = np.add(block, self._key, out=self._mixed[: len(block)])
            products = self._products[: len(block)]
            np.multiply(mixed[:, 0], mixed[:, 1], out=products, dtype=np.uint64)
            products.sum(axis=1, out=sums[begin : begin + ROWS])
        return sums
