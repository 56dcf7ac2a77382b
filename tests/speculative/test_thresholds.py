"""The accept thresholds: SGLang's rule in distribution, and nothing at all where they are 1."""

from functools import cache

import numpy as np
import pytest

from forerun.executors.host_choice import path_of
from forerun.speculative.accept import NOTHING, choose
from forerun.speculative.noise import coin, gumbel
from forerun.speculative.sampling import History, Sampling
from forerun.speculative.thresholds import children, relaxed
from forerun.speculative.tree import batch
from tests.lazy import LazyModule
from tests.speculative.worlds import as_draft

stats = LazyModule("scipy.stats")


P = np.array([0.36, 0.24, 0.15, 0.1, 0.1, 0.05], np.float64)
LOGITS = np.log(P).astype(np.float32)
DRAWS = 6000


def lossy(single=1.0, acc=1.0, seed=0):
    return Sampling(seed=seed, accept_threshold_single=single, accept_threshold_acc=acc)


@cache
def choices():
    """The target's choice by seed, in which thresholds have no part."""
    return [choose(LOGITS, lossy(seed=seed), 3) for seed in range(DRAWS)]


def outcomes(single, acc, drafted):
    """How often each token follows, over seeds."""
    counts = np.zeros(len(LOGITS))
    for seed, chosen in enumerate(choices()):
        counts[relaxed(LOGITS, lossy(single, acc, seed), 3, drafted, chosen)] += 1
    return counts / DRAWS


def by_the_rule(single, acc, drafted):
    """The same by SGLang's rule, integrated over its coin."""
    expected, passed, total = np.zeros(len(P)), 0.0, 0.0
    for token in drafted:
        total += P[token]
        limit = 1.0 if single < 1 and P[token] >= single else min(1.0, total / acc)
        expected[token] = max(limit - passed, 0.0)
        passed = max(passed, limit)
    rest = P.copy()
    rest[drafted] = 0
    return expected + (1 - passed) * rest / rest.sum()


@pytest.mark.parametrize(
    ("single", "acc", "drafted"),
    [
        (1.0, 0.6, [5, 1, 2]),
        (0.2, 0.8, [4, 1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((1.0, 1.0, [2, 0]), (1.0, 0.5, [3])),
                *((0.3, 1.0, [2, 0, 1]), (0.9, 0.3, [1, 0])),
            )
        ),
    ],
)
def test_it_is_the_rule_in_distribution(single, acc, drafted):
    expected, actual = by_the_rule(single, acc, drafted), outcomes(single, acc, drafted)
    possible = expected > 0
    assert expected.sum() == pytest.approx(1) and not actual[~possible].any()
    if possible.sum() > 1:
        test = stats.chisquare(actual[possible] * DRAWS, expected[possible] * DRAWS)
        assert test.pvalue > 1e-3


def test_with_thresholds_of_one_it_is_the_choice():
    random = np.random.default_rng(0)
    for seed in range(300):
        logits = random.normal(0, 2, 9).astype(np.float32)
        chosen = choose(logits, lossy(seed=seed), seed)
        drafted = random.permutation(9)[: 1 + seed % 9].tolist()
        assert relaxed(logits, lossy(seed=seed), seed, drafted, chosen) == chosen
    assert (
        not lossy().lossy
        and lossy().temperature_only
        and Sampling().accept_thresholds == (1.0, 1.0)
    )


def test_with_thresholds_of_one_even_the_most_unlikely_choice_stands():
    """All else has the probability 1, as float64 has it."""
    assert relaxed(np.array([0, -50], np.float32), lossy(), 0, [0], 1) == 1


def test_a_share_that_equals_the_threshold_is_accepted():
    assert relaxed(np.zeros(2, np.float32), lossy(0.5), 3, [1], 0) == 1


def test_children_are_those_right_below_a_node_in_their_order():
    one = np.array([1], np.int32)
    bush = as_draft([4, 5, 4, 6, 7, 5, 8], [-1, -1, 0, 0, 1, -1, 3])
    trees = batch([one, one, one], [as_draft([2], [-1]), bush, as_draft([3], [-1])])
    root = trees.root(1)
    below = [list(children(trees, 1, node)) for node in range(root, root + 1 + len(bush))]
    assert below == [[4, 5, 5], [4, 6], [7], [], [8], [], [], []]


def test_what_is_impossible_never_passes():
    logits = LOGITS.copy()
    logits[0] = -np.inf
    for seed in range(50):
        sampling = lossy(0.0, 0.0, seed)
        chosen = choose(logits, sampling, 0)
        assert relaxed(logits, sampling, 0, [0, 4, 1], chosen) == 4
        assert relaxed(logits, sampling, 0, [0], chosen) == chosen != 0


def test_the_same_token_twice_counts_once():
    for seed in range(100):
        sampling = lossy(1.0, 0.7, seed)
        chosen = choose(LOGITS, sampling, 0)
        once = relaxed(LOGITS, sampling, 0, [3, 1], chosen)
        assert relaxed(LOGITS, sampling, 0, [3, 3, 1, 3], chosen) == once


def test_coins_are_uniform_and_no_noise():
    thrown = [coin(seed, position) for seed in range(60) for position in range(60)]
    assert stats.kstest(thrown, "uniform").pvalue > 1e-3
    noise = [gumbel(seed, 1, 1)[0] for seed in range(400)]
    assert abs(stats.pearsonr(noise, [coin(seed, 1) for seed in range(400)]).statistic) < 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_path_goes_along_what_passed(temperature):
    """At temperature 0 thresholds change nothing."""
    trees = batch((np.array([1], np.int32),), (as_draft([5, 3, 2], [-1, 0, 1]),))
    history = History(np.array([1], np.int32), 1)
    for seed in range(20):
        sampling = Sampling(temperature, seed=seed, accept_threshold_acc=0.0)
        path = path_of(trees, 0, sampling, history, lambda node: LOGITS, None)
        if temperature == 0:
            assert not sampling.lossy and (path.nodes, path.tokens) == ((), (0,))
        else:
            assert path.nodes == (1, 2, 3)
            assert path.tokens == (5, 3, 2, choose(LOGITS, sampling, 3))


def test_a_node_without_logits_is_not_entered():
    trees = batch((np.array([1], np.int32),), (as_draft([5, 3], [-1, 0]),))
    history, broken = History(np.array([1], np.int32), 1), np.full(6, np.nan, np.float32)
    sampling = Sampling(accept_threshold_acc=0.0)
    path = path_of(trees, 0, sampling, history, lambda node: broken if node == 2 else LOGITS, None)
    assert (path.nodes, path.tokens) == ((1,), (5, 3))
    path = path_of(trees, 0, sampling, history, lambda node: broken, None)
    assert path.tokens == () and NOTHING not in path.tokens
