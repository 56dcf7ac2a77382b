"""Choices of torch's and XLA's programs are the host's: same noise, same argmax, same walk, same
refusals. Those of the kernel are in test_triton_choice.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.executors.device_choice import DeviceNodes
from forerun.executors.host_sampler import HostSampler
from forerun.executors.jax.network.attention import ancestors
from forerun.executors.jax.rounds import accept, noise
from forerun.executors.jax.rounds.accept import NodeSampling, Trees, unpacked, walk
from forerun.executors.jax.rounds.accept import choose as choose_on_xla
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.accept import NodeNoise, best, greatest, gumbel
from forerun.speculative import noise as host
from forerun.speculative.accept import NOTHING, accept_row, choose
from forerun.speculative.sampling import Sampling, unpack
from forerun.speculative.tree import batch
from forerun.speculative.verify import intervals
from tests.models import tiny
from tests.parity.conftest import QUICK
from tests.parity.driver import Driver, Row, chain_draft, limits
from tests.speculative.worlds import drafts
from tests.twins.verify import ancestor_mask

CPU = torch.device("cpu")
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x123456789ABCDEF0, (1 << 64) - 1]
POSITIONS = np.array([0, 1, 7, 4095, 131071, 2], np.int32)
QUICKLY = partial(jax.jit, compiler_options=QUICK)
EXACT = QUICKLY(noise.exact)
CHOOSE = QUICKLY(choose_on_xla)


def nodes(cases):
    """DeviceNodes of (seed, position, temperature)."""
    seeds, positions, heats = zip(*cases, strict=True)
    return DeviceNodes(
        np.arange(len(cases), dtype=np.int32),
        np.array(seeds, np.uint64),
        np.array(positions, np.int32),
        np.array(heats, np.float32),
    )


def halves(seeds):
    return np.array([[s & 0xFFFFFFFF for s in seeds], [s >> 32 for s in seeds]], np.uint32)


def node_sampling(cases):
    """NodeSampling of (seed, position, temperature)."""
    seeds, positions, temperatures = zip(*cases, strict=True)
    return NodeSampling(
        halves(seeds), np.array(positions, np.int32), np.array(temperatures, np.float32)
    )


def choices(logits, cases, device=CPU):
    """int32[n] as a step without kernels makes them, of (seed, position, temperature) of each."""
    noise, logits = NodeNoise.of(nodes(cases), device), torch.as_tensor(logits).to(device)
    score, tokens = best(logits, noise, 0)
    if not noise.temperatures.any():
        for one, other in zip(greatest(logits, noise, 0), (score, tokens), strict=True):
            assert torch.equal(one.nan_to_num(9e9), other.nan_to_num(9e9))
    return torch.where(score.isfinite(), tokens, NOTHING)


CHOICES = {
    "torch": choices,
    "jax": lambda logits, cases: CHOOSE(logits, node_sampling(cases)),
}
"""(logits float32[n,V], (seed, position, temperature) of each) -> tokens."""


@pytest.mark.parametrize("program", CHOICES)
def test_choices_are_the_hosts(program):
    random = np.random.default_rng(3)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(150)]
    logits = (random.normal(size=(150, 1000)) * 4).astype(np.float32)
    logits[::10] = np.round(logits[::10])  # Ties.
    found = CHOICES[program](logits, cases).tolist()
    for line, (seed, position, temperature), token in zip(logits, cases, found, strict=True):
        scaled = line if temperature in (0.0, 1.0) else line / np.float32(temperature)
        assert token == choose(scaled, Sampling(temperature=temperature, seed=seed), position)
    assert len(set(found)) > 50


@pytest.mark.parametrize("program", CHOICES)
def test_ties_go_to_the_lowest_id_and_trouble_to_nothing(program):
    logits = np.zeros((5, 9), np.float32)
    logits[0, [3, 7]] = 2.0
    logits[1, 4] = np.nan
    logits[2, 8] = np.inf
    logits[3] = -np.inf
    logits[4, :8] = -np.inf
    for temperature in (0.0, 1.0):
        found = CHOICES[program](logits, [(5, 1, temperature)] * 5).tolist()
        assert found[1:] == [NOTHING, NOTHING, NOTHING, 8]
        assert temperature or found[0] == 3


# --- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 6, 320, 49152])
def test_noise_is_the_hosts(vocab):
    made = NodeNoise.of(nodes([(*each, 1.0) for each in zip(SEEDS, POSITIONS, strict=True)]), CPU)
    found = gumbel(made.seeds, made.positions.long(), vocab).numpy()
    for line, seed, position in zip(found, SEEDS, POSITIONS, strict=True):
        expected = host.gumbel(seed, int(position), vocab)
        # Two libraries' float64 logarithms may differ in the last bit: then float32 may, too.
        assert np.abs(line.view(np.int32) - expected.view(np.int32)).max() <= 1
        assert (line != expected).sum() <= 1


@pytest.fixture(scope="module")
def executor(checkpoint):
    return TorchExecutor(checkpoint("llama"), limits(tiny.VOCAB))


def text(executor, samplings, count=14):
    """Tokens of several rows with chains of partly right draft tokens, all in one batch."""
    prompt = list(range(20, 33))
    with Driver(executor) as driver:
        for slot, sampling in enumerate(samplings):
            driver.open(slot, prompt[slot:], sampling)
        draft_tokens = {slot: [] for slot in range(len(samplings))}
        while min(len(s.tokens) for s in driver.sequences.values()) < len(prompt) + count:
            rows = [
                Row(s, draft=chain_draft(np.array(g, np.int32))) for s, g in draft_tokens.items()
            ]
            driver.step(rows)
            last = {slot: s.tokens[-1] for slot, s in driver.sequences.items()}
            draft_tokens = {slot: [last[slot], 40, 41] for slot in draft_tokens}
        return [s.tokens[: len(prompt) + count] for s in driver.sequences.values()]


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.3, seed=(1 << 63) + 9),
    Sampling(temperature=0.8, seed=5, top_k=20),
]


def test_the_executors_text_is_the_slow_twins(executor, monkeypatch):
    fast = text(executor, SAMPLINGS)
    monkeypatch.setattr(executor, "sampler", HostSampler(executor.limits.slots, tiny.VOCAB))
    assert fast == text(executor, SAMPLINGS)


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"logprobs": 1}])
def test_logits_cross_to_the_host_only_when_asked_for(executor, monkeypatch, extra):
    copied = []
    original = torch.Tensor.cpu

    def counted(tensor):
        copied.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    text(executor, [replace(s, **extra) for s in SAMPLINGS[:3]])
    assert bool(copied) == bool(extra)


# --- XLA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vocab", [6, 49152, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (1, 320))]
)
def test_words_are_the_hosts(vocab):
    found = np.asarray(noise.noise_words(halves(SEEDS), POSITIONS, vocab))
    some = np.array([0, vocab // 2, vocab - 1], np.int32)
    for line, seed, position in zip(found, SEEDS, POSITIONS, strict=True):
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
    error = np.abs(np.asarray(QUICKLY(noise.approximate)(words)) - host._gumbel(words)).max()
    assert 0 < error < noise.APPROXIMATE_ERROR / 4


@pytest.mark.parametrize("spoiled", [pytest.param(0.0, marks=pytest.mark.slow), 1e-5])
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
    found = QUICKLY(partial(choose_on_xla))(logits, node_sampling(cases)).tolist()
    expected = [choose(line, Sampling(seed=n), n) for n, line in enumerate(logits)]
    assert found == expected
    assert len(set(found)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_choices_are_the_hosts(temperature):
    random = np.random.default_rng(5)
    logits = (random.normal(size=(40, 70)) * 3).astype(np.float32)
    bits = random.integers(0, 1 << 32, (40, 3), np.uint64).astype(np.uint32)
    bits[7] = 0
    logits[8, 69] = np.inf  # Even where the mask hides it.
    cases = [(9, n, temperature) for n in range(40)]
    found = CHOOSE(logits, node_sampling(cases), unpacked(jnp.asarray(bits), 70)).tolist()
    for n, (line, mask, token) in enumerate(zip(logits, bits, found, strict=True)):
        allowed = np.where(unpack(mask, 70), line, -np.inf).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=9)
        expected = choose(allowed, sampling, n) if n != 8 else NOTHING
        assert token == expected
    assert found[7] == NOTHING


@given(draft=drafts(), data=st.data())
@settings(max_examples=150)
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


WALK = QUICKLY(walk)


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
@settings(max_examples=50)
def test_intervals_are_the_ancestor_mask(draft):
    trees = batch([np.array([3, 4], np.int32)], [draft])
    enter, leave = intervals(trees.parents)
    mask = (enter <= enter[:, None]) & (enter[:, None] < leave)
    assert (mask == ancestor_mask(trees, 0)).all()
