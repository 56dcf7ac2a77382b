"""What floats become in Q4_K, by ggml's rule of the format, in NumPy.

256 numbers have two halves, d and dmin, and for each of eight groups of 32 a scale s and an offset
o of 6 bits and 32 steps q of 4 bits: x ~ (d s) q - (dmin o). A group's scale and offset are those
of 22 that leave the least weighted squared error (a number's weight is its size plus the group's
root mean square): one spans the group, the others are least squares over steps of a fourteenth to
a sixteenth, by tenths, of what lies between the offset that is best so far and the largest number.
Then the largest scale and the largest offset of the eight become 63 steps, and q is found again for
what was rounded.
"""

import numpy as np

from forerun.types import AnyArray

GROUP, GROUPS = 32, 8
_TRIES = np.arange(21, dtype=np.float32)
F = np.float32


def _steps(scaled: AnyArray) -> AnyArray:
    return np.clip(np.rint(scaled), 0, 15).astype(np.float32)


def _sum(parts: AnyArray) -> AnyArray:
    """float32[N] of float32[N,32]: one after the other, in float32."""
    return np.cumsum(parts, axis=1, dtype=np.float32)[:, -1]


def _error(x: AnyArray, weight: AnyArray, q: AnyArray, scale: AnyArray, low: AnyArray) -> AnyArray:
    off = scale[:, None] * q + low[:, None] - x
    return _sum(weight * (off * off))


def scale_and_offset(x: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """float32[N] scales, float32[N] offsets (what is subtracted, 0 or more) and int steps [N,32] of
    groups float32[N,32].
    """
    root = np.sqrt(_sum(x * x) / F(GROUP))
    weight = root[:, None] + np.abs(x)
    low, high = np.minimum(x.min(axis=1), F(0)), x.max(axis=1)
    flat = high == low
    inverse = F(15) / np.where(flat, F(1), high - low)
    scale = F(1) / inverse
    q = _steps(inverse[:, None] * (x - low[:, None]))
    best, integers = _error(x, weight, q, scale, low), q
    total, mean = _sum(weight), _sum(weight * x)
    for attempt in _TRIES:
        tried = ((F(-1) + F(0.1) * attempt) + F(15)) / np.where(flat, F(1), high - low)
        q = _steps(tried[:, None] * (x - low[:, None]))
        one, two = _sum(weight * q), _sum(weight * q * q)
        cross = _sum(weight * q * x)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = total * two - one * one
            this = (total * cross - mean * one) / whole
            under = (two * mean - one * cross) / whole
            above = under > 0
            this, under = np.where(above, cross / two, this), np.where(above, F(0), under)
            error = _error(x, weight, q, this, under)
            better = (whole > 0) & (error < best)
        best, scale, low = (
            np.where(better, new, old) for new, old in ((error, best), (this, scale), (under, low))
        )
        integers = np.where(better[:, None], q, integers)
    scale, integers = np.where(flat, F(0), scale), np.where(flat[:, None], F(0), integers)
    return scale, -low, integers.astype(np.uint8)


def _sixes(values: AnyArray) -> tuple[AnyArray, AnyArray]:
    """uint8[N,8] of float32[N,8] in steps of the largest's 63rd, and half[N], that step."""
    most = np.abs(values.max(axis=1, initial=0))  # No -0.
    inverse = np.where(most > 0, F(63) / np.where(most > 0, most, F(1)), F(0))
    sixes = np.minimum(np.rint(inverse[:, None] * values), 63).astype(np.uint8)
    return sixes, (most / F(63)).astype(np.float16)


def quantise(rows: AnyArray) -> AnyArray:
    """uint8[N, K/256*144] of float32[N,K], as a GGUF file stores Q4_K."""
    x = np.ascontiguousarray(rows, np.float32).reshape(-1, GROUPS, GROUP)
    groups = scale_and_offset(x.reshape(-1, GROUP))
    scale, offset = (part.reshape(-1, GROUPS) for part in groups[:2])
    q = groups[2].reshape(x.shape)
    s, d = _sixes(scale)
    o, dmin = _sixes(offset)
    step = d.astype(np.float32)[:, None] * s
    low = dmin.astype(np.float32)[:, None] * o
    with np.errstate(divide="ignore", invalid="ignore"):
        again = _steps((x + low[:, :, None]) / step[:, :, None])
    q = np.where(step[:, :, None] == 0, q, again).astype(np.uint8)
    packed = np.zeros((len(x), 12), np.uint8)
    packed[:, :4] = s[:, :4] | (s[:, 4:] >> 4) << 6
    packed[:, 4:8] = o[:, :4] | (o[:, 4:] >> 4) << 6
    packed[:, 8:] = (s[:, 4:] & 15) | (o[:, 4:] & 15) << 4
    nibbles = q[:, 0::2] | q[:, 1::2] << 4
    halves = np.stack([d, dmin], axis=1).view(np.uint8)
    blocks = np.concatenate([halves, packed, nibbles.reshape(len(x), -1)], axis=1)
    return blocks.reshape(len(rows), -1)
