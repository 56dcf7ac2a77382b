"""forerun.speculative.noise in a program: the same words, the same Gumbel variables.

JAX computes in 32 bits unless a process-wide switch says otherwise. So products of two 32-bit words
are computed from 16-bit halves. -log(-log(u)), which the host computes in float64, is computed in
float64 for few tokens only, since float64 is slow or emulated on most devices: `approximate`
excludes the others (accept.py). Why a program decides near ties: decision 0027.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.speculative.noise import ROUNDS

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_STEP = np.float64(2.0**-32)

APPROXIMATE_ERROR = 2e-5
"""Bound of the error of `approximate`; the greatest over 2**24 words and both ends was 2e-6."""


def _multiply(word: Array, constant: int) -> tuple[Array, Array]:
    """Return the high and low halves of the 64-bit products of uint32 words and a constant."""
    high, low = word >> 16, word & 0xFFFF
    top, bottom = np.uint32(constant >> 16), np.uint32(constant & 0xFFFF)
    cross = high * bottom + ((low * bottom) >> 16)
    middle = low * top + (cross & 0xFFFF)
    return high * top + (cross >> 16) + (middle >> 16), word * np.uint32(constant)


def philox(
    counter: tuple[Array, ...], key: tuple[Array, Array], looped: bool = False
) -> tuple[Array, ...]:
    """Return the four words uint32[...] of Philox-4x32-10 (Salmon et al., SC 2011).

    counter  two to four words uint32[...], the others being zero
    key      two words uint32[...]
    looped   as a loop, which compiles sooner and runs slower on large arrays
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


def noise_words(seeds: Array, positions: Array, vocab: int) -> Array:
    """Return uint32[n,V], the noise words of all tokens at n nodes.

    seeds      uint32[2,n] low and high halves
    positions  int32[n] output positions
    """
    blocks = -(-vocab // 4)
    shape = (len(positions), blocks)
    block = jnp.broadcast_to(lax.iota(jnp.uint32, blocks), shape)
    place = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], shape)
    low, high = (jnp.broadcast_to(half[:, None], shape) for half in seeds)
    words = jnp.stack(philox((block, place), (low, high)), -1)
    return words.reshape(len(positions), 4 * blocks)[:, :vocab]


def words_of(seeds: Array, positions: Array, tokens: Array) -> Array:
    """Return uint32[...], the noise words of single tokens int32[...]; seeds uint32[2,...] and
    output positions int32[...] of the same shape.
    """
    block = (tokens // 4).astype(jnp.uint32)
    place = positions.astype(jnp.uint32)
    words = jnp.stack(philox((block, place), (seeds[0], seeds[1]), looped=True))
    return jnp.take_along_axis(words, (tokens % 4)[None], 0)[0]


def approximate(words: Array) -> Array:
    """Return Gumbel variables float32[...] of words uint32[...], with an error below
    APPROXIMATE_ERROR. Near u = 1 the logarithm is computed from 1 - u, which float32 represents
    exactly enough.
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
    """Return Gumbel variables float32[...] of words uint32[...], computed in float64 and rounded as
    in forerun.speculative.noise, bit for bit.
    """
    with jax.enable_x64(True):
        uniform = (lax.convert_element_type(words, np.float64) + np.float64(0.5)) * _STEP
        return lax.convert_element_type(-lax.log(-lax.log(uniform)), np.float32)
