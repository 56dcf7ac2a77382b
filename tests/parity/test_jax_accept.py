"""The JAX programs' choices are the host's: same noise, same argmax, same walk, same refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.jax import accept, noise
from forerun.executors.jax.accept import Rules, Trees, choose, unpacked, walk
from forerun.executors.jax.attention import ancestors
from forerun.speculative import noise as host
from forerun.speculative.accept import NOTHING, accept_row
from forerun.speculative.accept import choose as choose_on_host
from forerun.speculative.sampling import Sampling, unpack
from forerun.speculative.tree import batch
from forerun.speculative.verify import intervals
from tests.speculative.worlds import drafts
from tests.twins.verify import ancestor_mask

SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x123456789ABCDEF0, (1 << 64) - 1]
EXACT = jax.jit(noise.exact)
CHOOSE = jax.jit(choose)


def halves(seeds):
    return np.array([[s & 0xFFFFFFFF for s in seeds], [s >> 32 for s in seeds]], np.uint32)


def rules(cases):
    """Rules of (seed, position, temperature)."""
    seeds, positions, temperatures = zip(*cases, strict=True)
    return Rules(halves(seeds), np.array(positions, np.int32), np.array(temperatures, np.float32))


@pytest.mark.parametrize("vocab", [1, 6, 320, 49152])
def test_words_are_the_hosts(vocab):
    positions = np.array([0, 1, 7, 4095, 131071, 2], np.int32)
    found = np.asarray(noise.words_of_all(halves(SEEDS), positions, vocab))
    some = np.array([0, vocab // 2, vocab - 1], np.int32)
    for line, seed, position in zip(found, SEEDS, positions, strict=True):
        expected = host._words(seed, int(position), np.arange(-(-vocab // 4))).T.reshape(-1)
        assert (line == expected[:vocab]).all()
        seeds, at = np.tile(halves([seed]), 3), np.full(3, position)
        assert (np.asarray(noise.words_of(seeds, at, some)) == expected[some]).all()


def telling_words():
    """Both ends, around 1/e where the Gumbel variable is 0, powers of two, and many others."""
    near = np.arange(-2000, 2000)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16)
    powers = (1 << np.arange(33))[:, None] + np.array([-2, -1, 0, 1])
    words = [near[near >= 0], (1 << 32) + near[near < 0], int(2**32 / np.e) + near, random]
    found = np.concatenate([*words, powers.ravel()])
    return found[(found >= 0) & (found < 1 << 32)].astype(np.uint32)


def test_exact_noise_is_the_hosts_to_the_bit():
    words = telling_words()
    found, expected = np.asarray(EXACT(words)), host._gumbel(words)
    assert (found.view(np.int32) == expected.view(np.int32)).all()


def test_approximate_noise_is_near_enough():
    words = telling_words()
    error = np.abs(np.asarray(jax.jit(noise.approximate)(words)) - host._gumbel(words)).max()
    assert 0 < error < noise.APPROXIMATE_ERROR / 4


def test_choices_are_the_hosts():
    random = np.random.default_rng(3)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(150)]
    logits = (random.normal(size=(150, 1000)) * 4).astype(np.float32)
    logits[::10] = np.round(logits[::10])  # Ties.
    found = CHOOSE(logits, rules(cases)).tolist()
    for line, (seed, position, temperature), token in zip(logits, cases, found, strict=True):
        scaled = line if temperature in (0.0, 1.0) else line / np.float32(temperature)
        sampling = Sampling(temperature=temperature, seed=seed)
        assert token == choose_on_host(scaled, sampling, position)
    assert len(set(found)) > 50


@pytest.mark.parametrize("spoiled", [0.0, 1e-5])
def test_near_ties_are_decided_by_the_exact_noise(spoiled, monkeypatch):
    """Also where the approximate noise is as wrong as it may be."""
    random = np.random.default_rng(4)
    cases = [(n, n, 1.0) for n in range(64)]
    # Logits that undo the noise: all scores lie within a few roundings.
    made = np.stack([host.gumbel(seed, position, 24) for seed, position, _ in cases])
    off = random.integers(-2, 3, made.shape) * 2.4e-7
    logits = (3.0 - made + off).astype(np.float32)
    near = noise.approximate

    def wrong(words):
        return near(words) + jnp.where(words % 2 == 0, spoiled, -spoiled)

    monkeypatch.setattr(accept, "approximate", wrong)
    # Another function: `choose` was compiled with the right noise.
    found = jax.jit(partial(choose))(logits, rules(cases)).tolist()
    expected = [choose_on_host(line, Sampling(seed=n), n) for n, line in enumerate(logits)]
    assert found == expected
    assert len(set(found)) > 5


def test_ties_go_to_the_lowest_id_and_trouble_to_nothing():
    logits = np.zeros((5, 9), np.float32)
    logits[0, [3, 7]] = 2.0
    logits[1, 4] = np.nan
    logits[2, 8] = np.inf
    logits[3] = -np.inf
    logits[4, :8] = -np.inf
    for temperature in (0.0, 1.0):
        found = CHOOSE(logits, rules([(5, 1, temperature)] * 5)).tolist()
        assert found[1:] == [NOTHING, NOTHING, NOTHING, 8]
        assert temperature or found[0] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_choices_are_the_hosts(temperature):
    random = np.random.default_rng(5)
    logits = (random.normal(size=(40, 70)) * 3).astype(np.float32)
    bits = random.integers(0, 1 << 32, (40, 3), np.uint64).astype(np.uint32)
    bits[7] = 0
    logits[8, 69] = np.inf  # Even where the mask hides it.
    cases = [(9, n, temperature) for n in range(40)]
    found = CHOOSE(logits, rules(cases), unpacked(jnp.asarray(bits), 70)).tolist()
    for n, (line, mask, token) in enumerate(zip(logits, bits, found, strict=True)):
        allowed = np.where(unpack(mask, 70), line, -np.inf).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=9)
        expected = choose_on_host(allowed, sampling, n) if n != 8 else NOTHING
        assert token == expected
    assert found[7] == NOTHING


@given(draft=drafts(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_walk_is_the_hosts(draft, data):
    """Any tree, twins among children included, any choices, rows that are not decided."""
    trees = batch([np.array([3], np.int32)], [draft])
    count, room = len(trees.tokens), 16
    if count > room:
        return
    chosen = np.array(data.draw(st.lists(st.integers(-1, 7), min_size=count, max_size=count)))
    path = accept_row(trees, 0, lambda node, _: int(chosen[node]))
    expected = np.zeros(room, bool)
    if path.tokens:
        expected[[0, *path.nodes]] = True
    for decided in (True, False):
        found = np.asarray(walked(trees, chosen, room, decided))
        assert (found == (expected & decided)).all()


WALK = jax.jit(walk)


def walked(trees, chosen, room, decided):
    count = len(trees.tokens)
    tokens, parents, choices = (np.full((1, room), fill, np.int32) for fill in (0, -1, 5))
    tokens[0, :count], parents[0, :count] = trees.tokens, trees.parents
    choices[0, :count] = chosen
    places = np.arange(room, dtype=np.int32)
    spans = np.stack([places + 2 * room, places + 2 * room + 1])[:, None]
    spans[:, 0, :count] = intervals(trees.parents)
    real = ((places < count) & decided)[None]
    return WALK(choices, Trees(tokens, parents, ancestors(spans), real))[0]


@given(draft=drafts())
@settings(max_examples=50, deadline=None)
def test_intervals_are_the_ancestor_mask(draft):
    trees = batch([np.array([3, 4], np.int32)], [draft])
    enter, leave = intervals(trees.parents)
    mask = (enter <= enter[:, None]) & (enter[:, None] < leave)
    assert (mask == ancestor_mask(trees, 0)).all()
