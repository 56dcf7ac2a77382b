"""Losslessness, both halves of it.

The same seed gives the same text with any tree (equality, over many trees), and over seeds the
text has the target's processed distribution (chi-square against exact enumeration).
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.speculative.accept import FEW, NOTHING, accept_row, choose, choose_among, choose_left
from forerun.speculative.noise import gumbel
from forerun.speculative.sampling import History, Sampling, process
from forerun.speculative.tree import Draft, batch
from tests.covering import covering, every
from tests.lazy import LazyModule
from tests.speculative.test_sampling import parameters
from tests.speculative.worlds import (
    NO_DRAFT,
    TABLE,
    V,
    as_draft,
    bits,
    decode,
    drafts,
    full_draft,
    joint,
    logits_after,
    random_draft,
    speculate,
)

stats = LazyModule("scipy.stats")


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "cuts": {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"temperature": 1.3, "repetition_penalty": 1.8},
    "frequency": {"temperature": 1.3, "frequency_penalty": 1.2},
    "presence": {"temperature": 1.3, "presence_penalty": 1.5},
    "bias": {"temperature": 1.3, "logit_bias": ((2, 1.5), (6, -2.0))},
    "min_tokens": {"temperature": 1.3, "min_tokens": 2, "stop_tokens": (5, 6)},
    "everything": {
        "temperature": 1.4,
        "top_k": 6,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": ((4, 0.5),),
        "min_tokens": 1,
        "stop_tokens": (3,),
    },
}


def drafter_of(kind: str, sampling: Sampling):
    """Drafters from useless to all-knowing; "coupled" even sees the target's noise."""
    random = np.random.default_rng(sampling.seed + 1)

    def coupled(tokens: list[int]) -> Draft:
        noise = gumbel(sampling.seed, len(tokens) - 4, V) if sampling.temperature else np.zeros(V)
        return as_draft(np.argsort(-(TABLE[tokens[-2], tokens[-1]] + noise))[:3].tolist(), [-1] * 3)

    def chain(tokens: list[int]) -> Draft:
        return as_draft(random.integers(0, V, 4).tolist(), [-1, 0, 1, 2])

    everything = full_draft(2)
    kinds = {
        "none": lambda tokens: NO_DRAFT,
        "chain": chain,
        "tree": lambda tokens: random_draft(random, 16),
        "all": lambda tokens: everything,
        "coupled": coupled,
    }
    return kinds[kind]


CASES = [(name, False) for name in SETTINGS]
CASES += [(name, True) for name in ("plain", "cuts", "min_tokens", "everything")]
OFTEN = ("plain", False), ("everything", True)
"""What each parameter makes of the logits is test_sampling's."""


@pytest.mark.parametrize(
    ("name", "grammar"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in OFTEN)) for case in CASES],
)
def test_the_text_has_the_targets_distribution_and_does_not_depend_on_the_drafter(name, grammar):
    runs, kinds = 1000, ["none", "chain", "tree", "all", "coupled"]
    counts = dict.fromkeys(product(range(V), repeat=2), 0)
    for seed in range(runs):
        sampling = Sampling(seed=seed, **SETTINGS[name])
        drafter = drafter_of(kinds[seed % len(kinds)], sampling)
        text, _ = speculate(sampling, drafter, 2, grammar)
        if seed % 9 == 0:
            assert text == decode(sampling, 2, grammar)
        counts[tuple(text)] += 1
    expected = joint(Sampling(**SETTINGS[name]), 2, grammar)
    check_counts(counts, expected, runs)


def check_counts(counts, expected, runs):
    """Chi-square, rare cells pooled; what is impossible must never happen."""
    assert all(counts[cell] == 0 for cell in counts if expected[cell] == 0)
    common = [cell for cell in counts if expected[cell] * runs >= 5]
    seen = [counts[cell] for cell in common]
    wanted = [expected[cell] * runs for cell in common]
    rest = runs - sum(wanted)
    if rest > 1e-6 * runs:
        seen, wanted = [*seen, runs - sum(seen)], [*wanted, rest]
    assert len(wanted) > 2, "a test that cannot fail"
    assert stats.chisquare(seen, wanted).pvalue > 1e-3


@cache
def decoded(sampling, count, grammar):
    """The same for every drafter."""
    return decode(sampling, count, grammar)


@pytest.mark.parametrize(
    ("kind", "grammar", "temperature"),
    covering(every(["chain", "tree", "all", "coupled"], [False, True], [0.0, 0.7, 1.5])),
)
def test_long_texts_are_the_same(kind, grammar, temperature):
    for seed, setting in enumerate(SETTINGS.values()):
        sampling = Sampling(**{**setting, "temperature": temperature, "seed": seed})
        text, _ = speculate(sampling, drafter_of(kind, sampling), 24, grammar)
        assert text == decoded(sampling, 24, grammar)


@settings(max_examples=120)
@given(drafts(), parameters, st.integers(0, 2**64 - 1), st.booleans())
def test_any_tree_under_any_parameters(draft, sampling, seed, grammar):
    """Hypothesis looks for a tree that changes the text: duplicates, ties and zero mass too.

    Where min_tokens leaves nothing to choose, both ways end there, with the same text.
    """
    sampling = replace(sampling, seed=seed)
    plain = decode(sampling, 6, grammar)
    text, outcomes = speculate(sampling, lambda tokens: draft, 6, grammar)
    assert text == plain
    assert all(outcome.n_draft_tokens[0] == len(draft) for outcome in outcomes)
    assert outcomes[-1].finite[0] == (len(plain) == 6)


def test_a_full_tree_accepts_everything_and_an_empty_one_nothing():
    sampling = Sampling(seed=3)
    _, outcomes = speculate(sampling, lambda tokens: full_draft(3), 24)
    assert [int(o.n_tokens[0]) for o in outcomes] == [4] * 6
    _, outcomes = speculate(sampling, lambda tokens: NO_DRAFT, 24)
    assert [int(o.n_tokens[0]) for o in outcomes] == [1] * 24


def test_a_drafter_that_sees_the_noise_is_always_right():
    """The coupling: largest q would be right only as often as the text is likely."""
    sampling = Sampling(seed=3, temperature=1.0)
    _, outcomes = speculate(sampling, drafter_of("coupled", sampling), 40)
    assert all(outcome.n_tokens[0] == 2 for outcome in outcomes)


@settings(max_examples=150)
@given(drafts(12), st.integers(1, 3), st.integers(0, 2**32))
def test_the_path_is_the_walk_along_the_choices(draft, known, seed):
    """Only nodes on the accepted path are chosen at, root first, with their own ancestors."""
    chain = np.zeros(known, np.int32)
    trees = batch([np.zeros(2, np.int32), chain], [as_draft([1], [-1]), draft])
    wanted = np.random.default_rng(seed).integers(0, V, len(trees.tokens))
    visited = []

    def choose_at(node, ancestors):
        visited.append((node, ancestors))
        return int(wanted[node])

    path = accept_row(trees, 1, choose_at)
    walk = [trees.root(1), *path.nodes]
    assert [node for node, _ in visited] == walk
    assert [ancestors for _, ancestors in visited] == [path.tokens[:i] for i in range(len(walk))]
    assert path.tokens == tuple(int(wanted[node]) for node in walk)
    for above, below in pairwise(walk):
        assert trees.parents[below] == above
        assert trees.tokens[below] == wanted[above]
    children = np.flatnonzero(trees.parents == walk[-1])
    assert wanted[walk[-1]] not in trees.tokens[children]


def test_a_guess_without_a_choice_is_not_entered():
    trees = batch([np.zeros(1, np.int32)], [as_draft([1, 2], [-1, 0])])
    choices = {0: 1, 1: 2, 2: NOTHING}
    path = accept_row(trees, 0, lambda node, ancestors: choices[node])
    assert (path.nodes, path.tokens) == ((1,), (1, 2))
    path = accept_row(trees, 0, lambda node, ancestors: NOTHING)
    assert (path.nodes, path.tokens) == ((), ())


def test_ties_go_to_the_lowest_id():
    assert choose(np.array([0, 2, 2, 1], np.float32), Sampling(temperature=0.0), 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("allowed", [[], [5], [2, 5], [0, 3, 4, 7], list(range(V))])
def test_a_choice_among_some_is_the_choice_under_their_mask(allowed, temperature):
    history = History(np.zeros(1, np.int32), 1)
    for seed in range(200):
        logits = TABLE[seed % V, seed // V % V]
        sampling = Sampling(temperature, seed=seed)
        expected = choose(process(logits, sampling, history, (), bits(allowed)), sampling, seed)
        choices = choose_among(logits, np.array(allowed, np.int32), sampling, seed)
        assert choices == expected and (choices == NOTHING or choices in allowed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_no_choice(bad, temperature):
    logits = np.zeros(V, np.float32)
    logits[5] = bad
    assert choose(logits, Sampling(temperature=temperature), 0) == NOTHING
    nothing = np.full(V, -np.inf, np.float32)
    assert choose(nothing, Sampling(temperature=temperature), 0) == NOTHING


def test_choices_at_different_positions_are_independent():
    """Positions share a seed; their choices must not share luck."""
    processed = logits_after([1, 2])
    runs = 1500
    pairs = [[choose(processed, Sampling(seed=seed), n) for n in (0, 1)] for seed in range(runs)]
    table = np.zeros((V, V))
    for first, second in pairs:
        table[first, second] += 1
    table = table[table.sum(1) > 40][:, table.sum(0) > 40]
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("left", [0, 1, 5, 3000])
def test_noise_of_what_is_left_gives_the_same_choice(temperature, left):
    """Ties, infinities and what is no number among it."""
    random, vocab = np.random.default_rng(left), 5000 if left > FEW else FEW // 2
    for seed in range(40):
        processed = np.full(vocab, -np.inf, np.float32)
        tokens = random.choice(vocab, left, replace=False)
        processed[tokens] = random.normal(0, 2, left).astype(np.float32).round(1)
        if left and seed % 4 == 3:
            processed[tokens[0]] = random.choice([np.nan, np.inf])
        sampling = Sampling(temperature=temperature, seed=seed)
        assert choose_left(processed, sampling, seed) == choose(processed, sampling, seed)
