"""forerun.speculative.noise in 32-bit integers: the same words, the same Gumbel variables.

JAX computes in 32 bits unless a process-wide switch says otherwise, and a TPU has no float64. So
products of two 32-bit words are put together from 16-bit halves, and -log(-log(u)), which the host
computes in float64, is computed in fixed point of 128 bits with the host's two roundings. That is
slow, so it is done for few tokens only: `approximate` bounds the others away (see accept.py).

Fixed point: four uint32 arrays, most significant word first, 120 bits behind the point.
"""

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.speculative.noise import ROUNDS
from forerun.types import AnyArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

FRACTION = 120
"""Bits behind the point."""

STEPS = 64
"""Factors 1 + 2^-k that are tried. What is left is below 2^-64, its square below the last bit."""

SIGNIFICANT = 53
"""Bits of a float64, to which the host rounds after each logarithm."""

APPROXIMATE_ERROR = 2e-5
"""`approximate` is nearer than this; 2e-6 was the most over 2**24 words and both ends."""


Fixed = tuple[Array, Array, Array, Array]
"""128 bits."""


def _multiply(word: Array, constant: int) -> tuple[Array, Array]:
    """High and low halves of the 64-bit products of uint32 words and a constant."""
    high, low = word >> 16, word & 0xFFFF
    top, bottom = np.uint32(constant >> 16), np.uint32(constant & 0xFFFF)
    cross = high * bottom + ((low * bottom) >> 16)
    middle = low * top + (cross & 0xFFFF)
    return high * top + (cross >> 16) + (middle >> 16), word * np.uint32(constant)


def philox(
    counter: tuple[Array, ...], key: tuple[Array, Array], looped: bool = False
) -> tuple[Array, ...]:
    """The four words of Philox-4x32-10 for counters of two or more words, which zeros follow, all
    uint32 of one shape.

    looped  as a loop, which compiles sooner, and runs slower on large arrays
    """

    def step(index: Any, words: tuple[Array, ...]) -> tuple[Array, ...]:
        one, other = (k + np.uint32(s) * index for k, s in zip(key, KEY_STEPS, strict=True))
        high, low = _multiply(words[0], MULTIPLIERS[0])
        other_high, other_low = _multiply(words[2], MULTIPLIERS[1])
        return other_high ^ words[1] ^ one, other_low, high ^ words[3] ^ other, low

    nothing = jnp.zeros_like(counter[0])
    words: tuple[Array, ...] = (*counter, *(nothing,) * (4 - len(counter)))
    if looped:
        words = lax.fori_loop(np.uint32(0), np.uint32(ROUNDS), step, words)
    for index in () if looped else range(ROUNDS):
        with np.errstate(over="ignore"):
            words = step(np.uint32(index), words)
    return words


def words_of_all(seeds: Array, positions: Array, vocab: int) -> Array:
    """uint32[n,V] words of all tokens, for seeds uint32[2,n] (low, high halves) and output
    positions int32[n].
    """
    blocks = -(-vocab // 4)
    shape = (len(positions), blocks)
    block = jnp.broadcast_to(lax.iota(jnp.uint32, blocks), shape)
    place = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], shape)
    low, high = (jnp.broadcast_to(half[:, None], shape) for half in seeds)
    words = jnp.stack(philox((block, place), (low, high)), -1)
    return words.reshape(len(positions), 4 * blocks)[:, :vocab]


def words_of(seeds: Array, positions: Array, tokens: Array) -> Array:
    """uint32[...] words of single tokens int32[...]; seeds uint32[2,...] and positions likewise."""
    block = (tokens // 4).astype(jnp.uint32)
    place = positions.astype(jnp.uint32)
    words = jnp.stack(philox((block, place), (seeds[0], seeds[1]), looped=True))
    return jnp.take_along_axis(words, (tokens % 4)[None], 0)[0]


def coins(seeds: Array, positions: Array) -> Array:
    """float32[n]: forerun.speculative.noise.coin, rounded, of seeds uint32[2,n] and positions."""
    place = positions.astype(jnp.uint32)
    counter = jnp.zeros_like(place), place, jnp.ones_like(place)
    word = philox(counter, (seeds[0], seeds[1]), looped=True)[0]
    return (word.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)


def approximate(words: Array) -> Array:
    """float32: Gumbel variables of words uint32, wrong by less than APPROXIMATE_ERROR.

    Near u = 1 the logarithm is taken of what is missing to 1, which a float32 holds exactly enough.
    """
    small = (words.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    missing = ((~words).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    low = words < np.uint32(1 << 31)
    inner = jnp.where(
        low,
        -jnp.log(jnp.where(low, small, 0.5)),
        -jnp.log1p(-jnp.where(low, 0.25, missing)),
    )
    return -jnp.log(inner)


def exact(words: Array) -> Array:
    """float32: Gumbel variables of words uint32, as forerun.speculative.noise rounds them.

    u = (2x + 1) / 2**33; -log(u) and -log of that, each rounded to a float64, then to a float32.
    """
    nothing = jnp.zeros_like(words)
    # (2x + 1) * 2**(120 - 33) = (2x + 1) * 2**87: x is shifted by 88 bits, and bit 87 is set.
    value = (words >> 8, (words << 24) | np.uint32(1 << 23), nothing, nothing)

    def logarithm(_: Array, state: tuple[Fixed, Array]) -> tuple[Fixed, Array]:
        found, negative = _minus_log(state[0])
        return _rounded(found, SIGNIFICANT), negative

    # A loop of two, so that the compiler sees it once.
    outer, negative = lax.fori_loop(0, 2, logarithm, (value, words < 0))
    return _as_float(_rounded(outer, 24), negative)


# --- fixed point of 128 bits ---------------------------------------------------------------


@lru_cache(maxsize=1)
def _tables() -> tuple[AnyArray, AnyArray]:
    """uint32[4,.]: log(1 + 2^-k) for k = 0 .. STEPS, and k log 2 for k = 0 .. 127."""
    with localcontext() as context:
        context.prec = 60
        factors = [(1 + Decimal(2) ** -k).ln() for k in range(STEPS + 1)]
        twos = [k * Decimal(2).ln() for k in range(128)]
        return _fixed(factors), _fixed(twos)


def _fixed(numbers: list[Decimal]) -> AnyArray:
    scaled = [int(number * (1 << FRACTION)) for number in numbers]
    return np.array([[n >> 96 - 32 * i & 0xFFFFFFFF for n in scaled] for i in range(4)], np.uint32)


def _select(which: Array, one: Fixed, other: Fixed) -> Fixed:
    a, b, c, d = (jnp.where(which, x, y) for x, y in zip(one, other, strict=True))
    return a, b, c, d


def _add(one: Fixed, other: Fixed) -> tuple[Fixed, Array]:
    """The sum, and bool[...] whether it left 128 bits."""
    out, carry = [], jnp.zeros_like(one[0])
    for left, right in zip(one[::-1], other[::-1], strict=True):
        partial = left + right
        total = partial + carry
        carry = ((partial < left) | (total < partial)).astype(jnp.uint32)
        out.append(total)
    d, c, b, a, over = lax.optimization_barrier((*out, carry > 0))
    return (a, b, c, d), over


def _minus(value: Fixed) -> Fixed:
    """2**128 - value."""
    nothing = jnp.zeros_like(value[0])
    a, b, c, d = (~word for word in value)
    return _add((a, b, c, d), (nothing, nothing, nothing, nothing + 1))[0]


def _words_right(value: Fixed, whole: Array) -> Fixed:
    """By so many whole words, -1 .. 4; below 0 to the left."""
    nothing = jnp.zeros_like(value[0])
    out = []
    for index in range(4):
        word = nothing
        for source in range(4):
            word = jnp.where(whole == index - source, value[source], word)
        out.append(word)
    # Without a barrier XLA fuses chains of these and computes each word again for every reader.
    a, b, c, d = lax.optimization_barrier(out)
    return a, b, c, d


def _shifted_right(value: Fixed, count: Array) -> Fixed:
    """By a scalar or one count per number, int32 0 .. 127."""
    whole, rest = count // 32, (count % 32).astype(jnp.uint32)
    low, high = _words_right(value, whole), _words_right(value, whole + 1)
    parts = zip(low, high, strict=True)
    a, b, c, d = ((here >> rest) | ((above << 1) << (31 - rest)) for here, above in parts)
    return a, b, c, d


def _shifted_left(value: Fixed, count: Array) -> Fixed:
    whole, rest = count // 32, (count % 32).astype(jnp.uint32)
    high, low = _words_right(value, -whole), _words_right(value, -whole - 1)
    parts = zip(high, low, strict=True)
    a, b, c, d = ((here << rest) | ((below >> 1) >> (31 - rest)) for here, below in parts)
    return a, b, c, d


def _leading_zeros(value: Fixed) -> Array:
    """int32[...]; 128 of zero."""
    count = jnp.zeros(value[0].shape, jnp.int32)
    above = jnp.ones(value[0].shape, bool)
    for word in value:
        count = count + jnp.where(above, lax.clz(word).astype(jnp.int32), 0)
        above = above & (word == 0)
    return count


def _minus_log(value: Fixed) -> tuple[Fixed, Array]:
    """|log(value)| and bool[...] where -log(value) is negative; for values in (0, 256).

    Shift and add (Muller, Elementary Functions, section 8): value = m * 2^e with m in [1, 2) is
    multiplied by every 1 + 2^-k that does not take it to 2. Then log 2 - log m is the sum of the
    factors' logarithms and of what is missing to 2, and nothing cancels for values just below 1.
    """
    factors, twos = (jnp.asarray(table) for table in _tables())
    zeros = _leading_zeros(value)
    exponent = 127 - FRACTION - zeros

    def step(k: Array, state: tuple[Fixed, Fixed]) -> tuple[Fixed, Fixed]:
        mantissa, total = state
        larger, over = _add(mantissa, _shifted_right(mantissa, k))
        a, b, c, d = (jnp.broadcast_to(word, over.shape) for word in factors[:, k])
        added, _ = _add(total, (a, b, c, d))
        return _select(over, mantissa, larger), _select(over, total, added)

    nothing = jnp.zeros_like(value[0])
    start = _shifted_left(value, zeros), (nothing, nothing, nothing, nothing)
    mantissa, total = lax.fori_loop(1, STEPS + 1, step, start)
    # mantissa = 2 - 2 d with 127 bits behind the point: d is what is missing, over 2**128.
    total, _ = _add(total, _shifted_right(_minus(mantissa), jnp.int32(128 - FRACTION)))
    a, b, c, d = twos[:, jnp.abs(exponent + 1)]
    below, _ = _add((a, b, c, d), total)
    above, _ = _add((a, b, c, d), _minus(total))
    return _select(exponent < 0, below, above), exponent >= 0


def _rounded(value: Fixed, bits: int) -> Fixed:
    """To so many significant bits, to nearest, ties to even."""
    shift = jnp.maximum(128 - _leading_zeros(value) - bits, 0)
    nothing = jnp.zeros_like(value[0])
    unit = _shifted_left((nothing, nothing, nothing, nothing + 1), shift)
    even = (shift > 0) & (_shifted_right(value, shift)[3] & 1 == 0)
    # Half a unit, less one where the last kept bit is even: then a tie stays below.
    half = _select(shift > 0, _shifted_right(unit, jnp.int32(1)), (nothing,) * 4)
    ones = jnp.where(even, np.uint32(0xFFFFFFFF), 0).astype(jnp.uint32)
    bias, _ = _add(half, (ones, ones, ones, ones))
    total, _ = _add(value, bias)
    a, b, c, d = (word & kept for word, kept in zip(total, _minus(unit), strict=True))
    return a, b, c, d


def _as_float(value: Fixed, negative: Array) -> Array:
    """float32 of a number of 24 significant bits; 0 stays 0."""
    zeros = _leading_zeros(value)
    mantissa = _shifted_left(value, jnp.minimum(zeros, 127))[0] >> 8
    exponent = (127 + 127 - FRACTION - zeros).astype(jnp.uint32)
    bits = (exponent << 23) | (mantissa & 0x7FFFFF) | (negative.astype(jnp.uint32) << 31)
    return lax.bitcast_convert_type(jnp.where(zeros < 128, bits, 0), jnp.float32)
