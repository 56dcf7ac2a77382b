"""The generator is Philox-4x32-10, and the noise is what the docstring says, on any machine."""

import math

import numpy as np
import pytest

from forerun.speculative.noise import coin, gumbel, gumbel_of, philox
from tests.lazy import LazyModule

stats = LazyModule("scipy.stats")


# Random123, kat_vectors: counter, key, result.
KNOWN = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def slow_philox(c: list[int], k: tuple[int, int]) -> list[int]:
    """As written in the paper, on Python integers."""
    key = list(k)
    for turn in range(10):
        if turn:
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert slow_philox(counter, key) == result
    assert philox(np.array(counter, np.uint64)[:, None], key)[:, 0].tolist() == result


def test_many_counters_at_once_are_each_their_own():
    random = np.random.default_rng(0)
    counters = random.integers(0, 2**32, (4, 50), dtype=np.uint64)
    key = (0x12345678, 0x9ABCDEF0)
    before = counters.copy()
    result = philox(counters, key)
    assert (counters == before).all()
    for index in range(50):
        assert result[:, index].tolist() == slow_philox(counters[:, index].tolist(), key)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1, 0xDEADBEEF_00C0FFEE])
def test_gumbel_is_the_documented_function(seed):
    noise = gumbel(seed, 1234, 11)
    for token in range(11):
        key = (seed % 2**32, seed // 2**32)
        word = slow_philox([token // 4, 1234, 0, 0], key)[token % 4]
        uniform = (word + 0.5) / 2**32
        expected = np.float32(-math.log(-math.log(uniform)))
        assert noise[token] == pytest.approx(expected, rel=2e-7)
    assert noise.dtype == np.float32


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 3, 2**20])
def test_a_coin_is_the_documented_function(seed, position):
    """The first word of the counter (0, position, 1, 0), in the middle of its 2**-32."""
    key = np.uint64(seed % 2**32), np.uint64(seed >> 32)
    words = philox(np.array([0, position, 1, 0], np.uint64).reshape(4, 1), key)
    assert coin(seed, position) == (int(words[0, 0]) + 0.5) / 2**32
    assert len({coin(seed, place) for place in range(100)}) == 100


def test_noise_of_some_tokens_is_that_of_all():
    some = np.array([0, 3, 4, 98, 17], np.int32)
    assert gumbel_of(5, 9, some).tolist() == gumbel(5, 9, 99)[some].tolist()


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    for vocab in (1, 5, 1001):
        assert gumbel(3, 5, vocab).tolist() == gumbel(3, 5, 49152)[:vocab].tolist()


@pytest.mark.parametrize(
    ("token", "position", "word"), [(1775258044, 2, 0), (1748120863, 3, 2**32 - 1)]
)
def test_extreme_words_stay_finite(token, position, word):
    """The least and the greatest word there are, at tokens where seed 0 has them: the half that is
    added is all that keeps their logarithms finite, and is seen nowhere else.
    """
    assert slow_philox([token // 4, position, 0, 0], (0, 0))[token % 4] == word
    (noise,) = gumbel_of(0, position, np.array([token], np.int32))
    assert noise == pytest.approx(-math.log(-math.log((word + 0.5) / 2**32)), rel=2e-7)


def test_the_remembered_noise_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        gumbel(1, 1, 8)[0] = 0.0


def test_it_is_gumbel_and_independent_across_tokens_positions_and_seeds():
    rows = np.stack([gumbel(seed, n, 2000) for seed in range(10) for n in range(10)])
    assert stats.kstest(rows.ravel(), "gumbel_r").pvalue > 0.01
    assert len(np.unique(rows)) > 0.99 * rows.size
    for other in (rows[::-1], np.roll(rows, 1, axis=1), np.roll(rows, 1, axis=0)):
        correlation = np.corrcoef(rows.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(rows.size)
