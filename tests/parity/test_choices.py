"""The contract "choices of an executor": whatever chooses - the compiled core, plain torch and its
twin, Triton's kernels (interpreted here), XLA - chooses what the host's rule does: same noise, same
argmax, ties to the lowest id, no choice of what is not finite. Then the same walk and the same
texts. With other parameters than a temperature: test_shaped_choices.py.
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

from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.host_sampler import HostSampler
from forerun.executors.jax.network.attention import ancestors
from forerun.executors.jax.rounds import accept, noise
from forerun.executors.jax.rounds.accept import NodeSampling, Trees, walk
from forerun.executors.jax.rounds.accept import choose as choose_on_xla
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.accept import best, gumbel
from forerun.speculative import noise as host
from forerun.speculative.accept import NOTHING, accept_row, choose
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import batch
from forerun.speculative.verify import intervals
from tests.covering import every
from tests.models import tiny
from tests.parity.conftest import QUICK
from tests.parity.driver import limits
from tests.parity.interpreted import load
from tests.references import rounds as references
from tests.speculative.worlds import drafts
from tests.worlds.choices import (
    MIXED,
    POSITIONS,
    SEEDS,
    choices,
    expected,
    native_choices,
    noise_of,
    text,
)

QUICKLY = partial(jax.jit, compiler_options=QUICK)
EXACT = QUICKLY(noise.exact)
CHOOSE = QUICKLY(choose_on_xla)
triton = load("triton.triton_choice")
NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


def halves(seeds):
    return np.array([[s & 0xFFFFFFFF for s in seeds], [s >> 32 for s in seeds]], np.uint32)


def node_sampling(cases):
    """NodeSampling of (seed, position, temperature)."""
    seeds, positions, temperatures = zip(*cases, strict=True)
    return NodeSampling(
        halves(seeds), np.array(positions, np.int32), np.array(temperatures, np.float32)
    )


ROWS, VOCAB = 64, 1003
"""Of every case, so that XLA compiles once."""


@pytest.fixture(scope="module")
def cores(checkpoint):
    made = {}

    def of(kernels):
        if kernels not in made:
            source = checkpoint("llama", vocab_size=VOCAB, num_hidden_layers=1)
            made[kernels] = CpuExecutor(source, limits(VOCAB), 1, kernels)
        return partial(native_choices, made[kernels])

    yield of
    for each in made.values():
        each.shutdown()


PROGRAMS = {
    "torch": choices,
    "reference": lambda logits, cases: references.choose(torch.from_numpy(logits), noise_of(cases)),
    "triton": lambda logits, cases: triton.choose(torch.from_numpy(logits), noise_of(cases)),
    "jax": lambda logits, cases, *allowed: CHOOSE(logits, node_sampling(cases), *allowed),
}
"""(logits float32[n,V], (seed, position, temperature) of each) -> tokens."""
CORES = {"cpu": "", "cpu, portable": "portable"}
"""What reads masks where it chooses; on torch that is shaping (test_shaped_choices.py)."""
MASKED = [*(pytest.param(name, marks=NATIVE) for name in CORES), "jax"]


@pytest.fixture
def program(request, cores):
    """The program by name."""
    name = request.param
    return cores(CORES[name]) if name in CORES else PROGRAMS[name]


def filled(lines, cases):
    """As many of them as a program takes at once, in turn."""
    turns = [n % len(lines) for n in range(ROWS)]
    return np.stack([lines[n] for n in turns]).astype(np.float32), [cases[n] for n in turns]


def of_any_size(random, turn):
    """Of every tenth row many tie; temperatures, seeds, sizes of any kind."""
    cases = [
        (SEEDS[n % 6], int(random.integers(1 << 20)), (0.0, 0.05, 0.8, 1.0, 3.0)[(n + turn) % 5])
        for n in range(ROWS)
    ]
    spread = np.array([(0.01, 1.0, 4.0, 10.0)[(n + turn) % 4] for n in range(ROWS)])
    logits = random.normal(size=(ROWS, VOCAB)) * spread[:, None]
    logits[::10] = np.round(logits[::10])
    return logits.astype(np.float32), cases


def of_few_numbers(random, turn):
    logits = random.integers(-2, 2, (ROWS, VOCAB)).astype(np.float32)
    return logits, [(n, 3, float(turn % 2)) for n in range(ROWS)]


def whose_scores_round_to_the_same(random, turn):
    """Scores of millions are rounded to eighths: at these positions two tokens tie that way, and
    the one of the lower id is chosen, though logit and noise together are less.
    """
    line = np.full(VOCAB, -20.0, np.float32)
    line[[3, 300]] = 20.0, np.nextafter(np.float32(20.0), np.float32(21.0))
    positions = 8356, 22866, 29132, 33050
    for position in positions:
        heated = line / np.float32(1e-5) + host.gumbel(0, position, VOCAB)
        assert heated[3] == heated[300] == heated.max()
    return filled([line] * 4, [(0, position, 1e-5) for position in positions])


def whose_score_is_beyond_float32(random, turn):
    line = np.full(VOCAB, -20.0)
    line[5] = 1e36
    return filled([line], [(0, 0, 1e-3)])


def whose_noise_wins_from_far_below(random, turn):
    """Nothing but rare noise brings these up: csrc/sample.inl looks at none that cannot come up."""
    lines, cases = [], []
    for position in range(400):
        noise = host.gumbel(11, position, VOCAB)
        token, other = int(noise.argmax()), int(noise[:32].argmin())
        if noise[token] >= 10 and token >= 32:
            line = np.full(VOCAB, -40, np.float32)
            line[other], line[token] = 0, noise[other] - noise[token] + np.float32(0.25)
            lines.append(line)
            cases.append((11, position, 1.0))
    assert len(lines) > 10
    return filled(lines[:ROWS], cases[:ROWS])


def whose_noise_makes_up_for_the_difference(random, turn):
    """The likelier token and one below it that tie exactly."""
    lines, cases, heat = [], [], np.float32(1e-4)
    for position in range(120):
        noise = host.gumbel(5, position, VOCAB)
        low, high = 3 + position % 5, 300
        score = np.float32(1) / heat + noise[high]
        line = np.full(VOCAB, -1, np.float32)
        line[high], line[low] = 1, np.float32((score - noise[low]) * heat)
        if line[low] < 1 and line[low] / heat + noise[low] == score:
            lines.append(line)
            cases.append((5, position, float(heat)))
    assert len(lines) > 5
    return filled(lines, cases)


def that_are_not_finite(random, turn):
    lines, cases = [], []
    for place in (0, 7, 319, VOCAB - 1):
        for bad in (np.nan, np.inf):
            lines.append(random.normal(0, 1, VOCAB))
            lines[-1][place] = bad
            cases.append((5, 1, float(turn % 2)))
    return filled([*lines, np.full(VOCAB, -np.inf)], [*cases, cases[0]])


LINES = {
    of_any_size: 3,
    of_few_numbers: 2,
    that_are_not_finite: 2,
    whose_scores_round_to_the_same: 1,
    whose_score_is_beyond_float32: 1,
    whose_noise_wins_from_far_below: 1,
    whose_noise_makes_up_for_the_difference: 1,
}
"""(random, turn) -> logits and cases; how many turns."""
ROUNDED = ("jax", whose_noise_makes_up_for_the_difference)
"""XLA multiplies by the reciprocal of a temperature, a rounding off: no tie is exact."""
CELLS = [cell for cell in every([*PROGRAMS, *CORES], LINES) if cell != ROUNDED]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(
    ("program", "lines"),
    [pytest.param(*cell, marks=[NATIVE] * (cell[0] in CORES)) for cell in CELLS],
    indirect=["program"],
)
def test_choices_are_the_hosts(program, lines):
    random, kinds = np.random.default_rng(3), set()
    for turn in range(LINES[lines]):
        logits, cases = lines(random, turn)
        actual = np.asarray(program(logits, cases)).tolist()
        assert actual == expected(logits, cases)
        kinds |= set(actual)
    assert lines is not of_any_size or len(kinds) > 50


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("program", MASKED, indirect=True)
def test_masked_choices_are_the_hosts(program):
    """Of masks that leave few tokens, half of them, nearly all or none; a mask hides no trouble."""
    random = np.random.default_rng(5)
    logits, cases = of_any_size(random, 0)
    allowed = random.random(logits.shape) < np.resize([0.01, 0.5, 0.99], (ROWS, 1))
    allowed[7] = False
    logits[8, 69], allowed[8, 69] = np.inf, False
    actual = np.asarray(program(logits, cases, allowed)).tolist()
    assert actual == expected(logits, cases, allowed)
    assert actual[7] == actual[8] == NOTHING


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_impossible_is_never_chosen(program):
    """All but the last token of a vocabulary of 4200, more than a kernel reads at once."""
    logits = np.full((2, 4200), -np.inf, np.float32)
    logits[:, 4199] = 0.0
    assert PROGRAMS[program](logits, [(5, 1, 0.0), (5, 1, 1.0)]).tolist() == [4199, 4199]


@pytest.mark.parametrize("work", [best, triton.best])
def test_the_best_of_parts_is_that_of_the_whole(work):
    """Parts that begin anywhere in a block of the noise's generator; a part may have nothing."""
    random = np.random.default_rng(4)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 1.0][i % 2]) for i in range(12)]
    logits = (random.normal(size=(12, 4301)) * 4).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    logits[3, :2150] = -np.inf
    wanted, noise, logits = expected(logits, cases), noise_of(cases), torch.from_numpy(logits)
    for size in (2, 4):
        spans = [TensorParallel(rank, size).span(4301) for rank in range(size)]
        actual = [work(logits[:, s].contiguous(), noise, s.start) for s in spans]
        scores, tokens = (torch.stack(each) for each in zip(*actual, strict=True))
        assert tokens.gather(0, scores.argmax(0)[None])[0].tolist() == wanted
        assert scores[:, 3].isneginf().any() == (noise.temperatures[3] >= 0)


# --- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 6, 320, 49152])
def test_noise_is_the_hosts(vocab):
    made = noise_of([(*each, 1.0) for each in zip(SEEDS, POSITIONS, strict=True)])
    actual = gumbel(made.seeds, made.positions.long(), vocab).numpy()
    for line, seed, position in zip(actual, SEEDS, POSITIONS, strict=True):
        wanted = host.gumbel(seed, int(position), vocab)
        # Two libraries' float64 logarithms may differ in the last bit: then float32 may, too.
        assert np.abs(line.view(np.int32) - wanted.view(np.int32)).max() <= 1
        assert (line != wanted).sum() <= 1


@pytest.fixture(scope="module")
def executor(checkpoint):
    return TorchExecutor(checkpoint("llama"), limits(tiny.VOCAB))


def test_the_executors_text_is_the_references(executor, monkeypatch):
    fast = text(executor, MIXED)
    monkeypatch.setattr(executor, "sampler", HostSampler(executor.limits.slots, tiny.VOCAB))
    assert fast == text(executor, MIXED)


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"logprobs": 1}])
def test_logits_cross_to_the_host_only_when_needed(executor, monkeypatch, extra):
    copied = []
    original = torch.Tensor.cpu

    def counted(tensor):
        copied.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    text(executor, [replace(s, **extra) for s in MIXED[:3]])
    assert bool(copied) == bool(extra)


# --- XLA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vocab", [6, 49152, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (1, 320))]
)
def test_words_are_the_hosts(vocab):
    actual = np.asarray(noise.noise_words(halves(SEEDS), POSITIONS, vocab))
    some = np.array([0, vocab // 2, vocab - 1], np.int32)
    for line, seed, position in zip(actual, SEEDS, POSITIONS, strict=True):
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
    result = np.concatenate([*words, powers.ravel()])
    return result[(result >= 0) & (result < 1 << 32)].astype(np.uint32)


def test_exact_noise_is_the_hosts_to_the_bit():
    words = telling_words()
    actual, expected = np.asarray(EXACT(words)), host._gumbel(words)
    assert (actual.view(np.int32) == expected.view(np.int32)).all()


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
    choices = QUICKLY(partial(choose_on_xla))(logits, node_sampling(cases)).tolist()
    expected = [choose(line, Sampling(seed=n), n) for n, line in enumerate(logits)]
    assert choices == expected
    assert len(set(choices)) > 5


@given(draft=drafts(), data=st.data())
@settings(max_examples=150)
def test_the_walk_is_the_hosts(draft, data):
    """Any tree, equal children included, any choices, rows that are not decided."""
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
        actual = np.asarray(walked(trees, chosen, room, decided))
        assert (actual == (expected & decided)).all()


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
