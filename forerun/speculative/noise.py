"""Noise by position: Gumbel variables from a counter-based generator.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011). It has no state: the noise of (seed, output position, token) is a pure function,
so a drafter, the target, the host and a device compute the same numbers, and the same seed gives
the same text whatever else runs in the batch.
"""

from functools import lru_cache

import numpy as np

from forerun.types import AnyArray, Floats, Ints

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], np.uint64
)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: AnyArray, key: tuple[int, int]) -> AnyArray:
    """Compute Philox-4x32-10 of n counters under one key.

    counter  uint64[4,n] whose values are 32-bit words; key two 32-bit words.
    Returns  uint64[4,n] 32-bit words.
    """
    # `even` holds words 0 and 2, which are multiplied; `odd` words 1 and 3, which are mixed in.
    even, odd = counter[0::2].copy(), counter[1::2].copy()
    product = np.empty_like(even)
    for round_key in (np.array([[key[0]], [key[1]]], np.uint64) + _KEY_STEPS) & _LOW:
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(product[::-1], _32, out=even)
        even ^= odd
        even ^= round_key
        np.bitwise_and(product[::-1], _LOW, out=odd)
    return np.stack([even[0], odd[0], even[1], odd[1]])


@lru_cache(maxsize=16)
def gumbel(seed: int, position: int, vocab: int) -> Floats:
    """Return the standard Gumbel noise of every token at one output position.

    Token t takes word t % 4 of philox(counter=(t // 4, position, 0, 0), key=(low and high
    half of seed)); with x that word, u = (x + 1/2) / 2**32 and g = -log(-log(u)) in float64,
    rounded to float32. All nodes of one depth share it. Returns float32[V], read-only; the
    last few results are cached.
    """
    noise = _gumbel(_words(seed, position, np.arange(-(-vocab // 4))).T.reshape(-1)[:vocab])
    noise.flags.writeable = False
    return noise


def gumbel_of(seed: int, position: int, tokens: Ints) -> Floats:
    """Return float32[n], equal bit for bit to `gumbel(seed, position, V)[tokens]`, without
    computing the noise of other tokens.

    tokens  int32[n] ids, in any order
    """
    words = _words(seed, position, tokens // 4)
    return _gumbel(words[tokens % 4, np.arange(len(tokens))])


def coin(seed: int, position: int) -> float:
    """Return a uniform number in (0, 1) that depends on (seed, output position) and is independent
    of the position's noise: its counter's third word is 1, the noise has 0. Used by accept
    thresholds only.
    """
    counter = np.array([[0], [position], [1], [0]], np.uint64)
    word = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[0, 0]
    return (float(word) + 0.5) * 2.0**-32


def _words(seed: int, position: int, blocks: AnyArray) -> AnyArray:
    """Return uint64[4,n]: the random words of blocks of four tokens."""
    counter = np.zeros((4, len(blocks)), np.uint64)
    counter[0] = blocks
    counter[1] = position
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))


def _gumbel(words: AnyArray) -> Floats:
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform).astype(np.float32)
