"""`process` against a reference that follows the definitions token by token."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.speculative.accept import choose
from forerun.speculative.sampling import History, Sampling, largest, log_normaliser, process, unpack
from tests.speculative.worlds import V, bits

INF = math.inf


def slow_process(logits, sampling, prompt, output, allowed):
    """Every parameter as its documentation has it, in the documented order."""
    z = [np.float32(x) for x in logits]
    for token in set(prompt) | set(output):
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in set(output):
        z[token] -= np.float32(sampling.frequency_penalty) * np.float32(output.count(token))
        z[token] -= np.float32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias:
        z[token] += np.float32(bias)
    early = sampling.stop_tokens if len(output) < sampling.min_tokens else ()
    legal = [t for t in range(len(z)) if allowed is None or t in allowed]
    legal = [t for t in legal if t not in early] or (legal if allowed is not None else [])
    z = [x if t in legal else -np.float32(INF) for t, x in enumerate(z)]
    if sampling.temperature == 0 or max(z) == -INF:
        return z
    return slow_cuts([x / np.float32(sampling.temperature) for x in z], sampling)


def slow_cuts(z, sampling):
    best = max(z)
    if sampling.min_p > 0:
        floor = best + np.float32(math.log(sampling.min_p))
        z = [x if x >= floor else -np.float32(INF) for x in z]
    order = sorted(range(len(z)), key=lambda t: (-z[t], t))
    if sampling.top_k > 0:
        for token in order[sampling.top_k :]:
            z[token] = -np.float32(INF)
    weights = np.exp(np.array(z, np.float32) - np.float32(best))
    total, mass = float(weights.sum(dtype=np.float64)), 0.0
    for token in order:
        if mass >= sampling.top_p * total and sampling.top_p < 1.0:
            z[token] = -np.float32(INF)
        mass += float(weights[token])
    return z


parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    top_k=st.integers(-1, V + 2),
    top_p=st.sampled_from([1e-9, 0.3, 0.75, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.75]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, V - 1), st.sampled_from([-100.0, -0.5, 2.0, 100.0])), max_size=3
    ).map(tuple),
    min_tokens=st.integers(0, 6),
    stop_tokens=st.lists(st.integers(0, V - 1), max_size=3).map(tuple),
)
some_logits = st.lists(
    st.sampled_from([-INF, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=V, max_size=V
).map(lambda values: np.array(values, np.float32))
texts = st.lists(st.integers(0, V - 1), max_size=5)


@settings(max_examples=75)
@given(some_logits, parameters, texts, texts, texts, st.none() | st.sets(st.integers(0, V - 1)))
def test_process_is_its_definition(logits, sampling, prompt, output, ancestors, allowed):
    history = History(np.array([*prompt, *output], np.int32), len(prompt))
    before = logits.copy()
    mask = None if allowed is None else bits(sorted(allowed))
    result = process(logits, sampling, history, ancestors, mask)
    expected = slow_process(logits, sampling, prompt, output + ancestors, allowed)
    assert result.dtype == np.float32
    assert result.tolist() == expected
    assert (logits == before).all()


@settings(max_examples=150)
@given(some_logits, parameters, texts, texts, texts)
def test_ancestors_count_as_output(logits, sampling, prompt, output, ancestors):
    """The same node, met as a draft token or met later as the root."""
    known = History(np.array(prompt + output, np.int32), len(prompt))
    later = History(np.array(prompt + output + ancestors, np.int32), len(prompt))
    tentative = process(logits, sampling, known, ancestors)
    assert tentative.tolist() == process(logits, sampling, later).tolist()
    assert known.tokens.tolist() == prompt + output, "a look must not change the history"


@settings(max_examples=150)
@given(some_logits, parameters)
def test_cut_offs_never_exclude_everything(logits, sampling):
    cuts = replace(sampling, min_tokens=0)
    result = process(logits, cuts, History(np.zeros(1, np.int32), 1))
    assert (result.max() > -INF) == (logits.max() > -INF)


@pytest.mark.parametrize("min_p", [0.02, 0.5, 0.9])
def test_min_p_leaves_what_is_just_that_likely(min_p):
    """A hundredth of its logarithm to both sides."""
    logits = np.array([0.0, 0.99, 1.01], np.float32) * np.float32(math.log(min_p))
    kept = process(logits, Sampling(min_p=min_p), History(np.zeros(1, np.int32), 1))
    assert kept.tolist() == [*logits[:2].tolist(), -INF]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_plain_path_equals_the_general_one(temperature):
    """A bias of zero and a mask of all ones leave the fast path but ask for nothing."""
    logits = np.random.default_rng(1).normal(0, 5, 500).astype(np.float32)
    history = History(np.array([3, 4], np.int32), 1)
    plain = Sampling(temperature=temperature)
    assert plain.temperature_only
    general = replace(plain, logit_bias=((0, 0.0),))
    assert not general.temperature_only
    ones = np.full(16, 0xFFFFFFFF, np.uint32)
    expected = process(logits, plain, history).tolist()
    assert process(logits, general, history).tolist() == expected
    assert process(logits, plain, history, (), ones).tolist() == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 1},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 0.9},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"min_tokens": 1},
    ],
)
def test_plain_knows_every_parameter(parameters):
    assert not Sampling(**parameters).temperature_only


def test_options_are_off_by_default():
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "min_tokens": 0}
    penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert Sampling() == Sampling(temperature=1.0, **off, **penalties)
    assert Sampling(temperature=1.0).temperature == 1.0
    assert Sampling(top_k=-1).temperature_only


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0, top_k=3)])
def test_without_parameters_nothing_is_copied(sampling):
    logits = np.zeros(V, np.float32)
    assert process(logits, sampling, History(np.zeros(1, np.int32), 1)) is logits


def test_a_temperature_too_small_to_divide_by_is_greedy():
    logits = np.array([0, 30, 29], np.float32)
    history = History(np.zeros(1, np.int32), 1)
    for tiny in (1e-6, 1e-40, 5e-324):
        assert Sampling(temperature=tiny).temperature == 0.0
    assert Sampling(temperature=-1e-6).temperature < 0, "what checks requests refuses it"
    warm = process(logits, Sampling(temperature=1e-5), history)
    assert np.isfinite(warm).all() and warm[1] > 30
    assert choose(warm, Sampling(temperature=1e-5), 0) == 1


def test_grammar_outranks_min_tokens():
    """Where the grammar is complete only a stop token is left, however early; without one none."""
    sampling = Sampling(min_tokens=5, stop_tokens=(6, 7))
    history = History(np.zeros(1, np.int32), 1)
    logits = np.zeros(V, np.float32)
    only_stop = process(logits, sampling, history, (), bits([6]))
    assert np.flatnonzero(only_stop > -INF).tolist() == [6]
    more = process(logits, sampling, history, (), bits([2, 6]))
    assert np.flatnonzero(more > -INF).tolist() == [2]
    free = process(logits, sampling, history)
    assert np.flatnonzero(free > -INF).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_mask_that_allows_nothing_leaves_nothing():
    history = History(np.zeros(1, np.int32), 1)
    for sampling in (Sampling(), Sampling(top_p=0.5, top_k=2, min_p=0.1), Sampling(temperature=0)):
        with np.errstate(all="raise"):
            nothing = process(np.zeros(V, np.float32), sampling, history, (), bits([]))
        assert nothing.max() == -INF


def test_a_cut_off_that_is_off_keeps_the_most_unlikely():
    """Nor is its logarithm taken."""
    logits, history = np.array([0, -100], np.float32), History(np.zeros(1, np.int32), 1)
    with np.errstate(divide="raise"):
        assert process(logits, Sampling(top_k=2), history).tolist() == [0, -100]
        assert Sampling().log_min_p == -INF


def test_top_p_of_two_tokens():
    logits, history = np.log(np.array([0.25, 0.75], np.float32)), History(np.zeros(1, np.int32), 1)
    for top_p, kept in ((0.7, [1]), (0.8, [0, 1])):
        result = process(logits, Sampling(top_p=top_p), history)
        assert np.flatnonzero(result > -INF).tolist() == kept


@pytest.mark.parametrize("vocab", [1, 8, 31, 32, 33, 100])
def test_unpack_reads_every_bit(vocab):
    random = np.random.default_rng(vocab)
    words = random.integers(0, 2**32, -(-vocab // 32), dtype=np.uint64).astype(np.uint32)
    expected = [bool(int(words[t // 32]) >> (t % 32) & 1) for t in range(vocab)]
    assert unpack(words, vocab).tolist() == expected


@pytest.mark.parametrize("first", [0.0, 12.5])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 8.0])
def test_top_p_on_a_real_vocabulary(spread, first):
    """From peaked (a few survivors) to nearly flat (tens of thousands of them), and where the first
    token has most of the mass, and thousands of others together the rest.
    """
    logits = np.random.default_rng(2).normal(0, spread, 49152).astype(np.float32)
    logits[1000:3000] = logits[1000]  # Ties across the cut.
    logits[0] += first
    history = History(np.zeros(1, np.int32), 1)
    for top_p in (0.1, 0.5, 0.95, np.nextafter(1, 0)):
        result = process(logits, Sampling(top_p=top_p), history)
        order = np.argsort(-logits, kind="stable")
        weights = np.exp((logits - logits.max()).astype(np.float64))
        mass = np.cumsum(weights[order]) / weights.sum()
        count = int((result > -INF).sum())
        assert abs(count - 1 - np.searchsorted(mass, top_p)) <= 1 or 1 - top_p < 1e-12
        assert set(np.flatnonzero(result > -INF)) == set(order[:count])


@given(
    st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=60),
    st.integers(1, 70),
)
def test_largest_is_a_stable_sort_cut_short(values, count):
    logits = np.array(values, np.float32)
    possible = [t for t in range(len(values)) if values[t] > -INF]
    expected = sorted(possible, key=lambda t: (-values[t], t))[:count]
    assert largest(logits, count).tolist() == expected


@pytest.mark.parametrize("row", [[-INF, -INF, -INF], [0.0, INF, 1.0], [0.0, math.nan, 1.0]])
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_of_what_nothing_can_be_chosen_nothing_is_cut(row, cut):
    logits, history = np.array(row, np.float32), History(np.zeros(1, np.int32), 1)
    assert np.array_equal(process(logits, Sampling(**cut), history), logits, equal_nan=True)


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_no_number_is_not_among_the_largest(count):
    assert largest(np.array([math.nan, 0, 1, -INF], np.float32), count).tolist() == [2, 1]


def test_log_normaliser_is_stable():
    assert log_normaliser(np.full(4, 1e4, np.float32)) == pytest.approx(1e4 + math.log(4))
    assert log_normaliser(np.array([-INF, 0, -INF], np.float32)) == 0.0
