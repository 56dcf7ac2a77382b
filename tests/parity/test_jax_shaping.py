"""All sampling parameters in a program: the host's choice, or none where top_p leaves it open."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from forerun.executors.jax.accept import Rules, Trees
from forerun.executors.jax.attention import ancestors
from forerun.executors.jax.batches import Batch, Size
from forerun.executors.jax.shaping import (
    Shaping,
    _largest,
    choose_shaped,
    edits_of,
    packed_shaping,
    room_for_edits,
)
from forerun.speculative.accept import NOTHING, choose
from forerun.speculative.sampling import History, Sampling, _keep_largest, process
from forerun.speculative.tree import batch
from forerun.speculative.verify import intervals
from tests.parity.driver import SHAPED, as_draft

VOCAB, ROWS = 700, 4
EDITS = room_for_edits(ROWS, 128, VOCAB)
SIZE = Size(ROWS, 4)
TREE = as_draft([5, 9, 5], [-1, 0, 1])
PATHS = [(), (5,), (5, 9), (5, 9, 5)]


@pytest.fixture(scope="module")
def chosen():
    """choose_shaped, compiled once: (logits [R,N,V], samplings, histories, allowed) -> [R,N]."""

    @jax.jit
    def run(logits, rules, trees, whole, allowed):
        return choose_shaped(logits, rules, trees, Shaping.of(whole, ROWS, EDITS), allowed)

    def choose_all(logits, samplings, histories, allowed, tree=TREE):
        trees = batch([np.array([7], np.int32)], [tree])
        every = Trees(
            np.tile(trees.tokens, (ROWS, 1)),
            np.tile(trees.parents, (ROWS, 1)),
            ancestors(np.repeat(intervals(trees.parents)[:, None], ROWS, 1)),
            np.ones(SIZE, bool),
        )
        dispatch = Batch(SIZE, False, tuple(range(ROWS)), (), ())
        asked = {
            row: (sampling, edits_of(sampling, history))
            for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True))
        }
        whole = packed_shaping(dispatch, asked, EDITS, VOCAB)
        seeds = np.repeat([[s.seed & 0xFFFFFFFF for s in samplings], [0] * ROWS], 4, 1)
        depth = np.tile(trees.depth, ROWS)
        rules = Rules(
            seeds.astype(np.uint32),
            (np.repeat([h.output_len for h in histories], 4) + depth).astype(np.int32),
            np.repeat([np.float32(s.temperature) for s in samplings], 4),
        )
        return np.asarray(run(logits, rules, every, whole, allowed))

    return choose_all


def expected(logits, sampling, history, path, allowed):
    bits = np.packbits(np.append(allowed, np.zeros(-len(allowed) % 32, bool)), bitorder="little")
    processed = process(logits, sampling, history, path, bits.view(np.uint32))
    return choose(processed, sampling, history.output_len + len(path))


@pytest.mark.parametrize("masked", [False, True])
def test_choices_are_the_hosts(chosen, masked):
    """Of every kind of row, at four nodes each that add draft tokens to what was said."""
    random = np.random.default_rng(0)
    compared = unsure = 0
    for turn in range(30):
        samplings, histories = [], []
        for row in range(ROWS):
            values = {"temperature": 0.9, "seed": 10 * turn + row} | SHAPED[
                (turn + 3 * row) % len(SHAPED)
            ]
            samplings.append(Sampling(**values))
            tokens = random.integers(0, 40, 20).astype(np.int32)
            histories.append(History(tokens, int(random.integers(5, 18))))
        logits = (random.normal(size=(ROWS, 4, VOCAB)) * 3).astype(np.float32)
        if turn % 3 == 0:
            logits = np.round(logits)  # Ties.
        allowed = np.ones((ROWS, 4, VOCAB), bool)
        if masked:
            allowed = random.random((ROWS, 4, VOCAB)) < 0.3
            allowed[0, :, :] = False
            allowed[0, :, [9, 11]] = True  # Stop tokens alone.
        found = chosen(logits, samplings, histories, allowed)
        for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
            for node, path in enumerate(PATHS):
                wanted = expected(logits[row, node], sampling, history, path, allowed[row, node])
                token, compared = found[row, node], compared + 1
                if token == NOTHING and wanted != NOTHING:
                    assert sampling.top_p < 1
                    unsure += 1
                else:
                    assert token == wanted, (sampling, node)
    assert compared == 30 * ROWS * 4 and unsure < compared / 100


def test_where_top_p_is_a_matter_of_rounding_there_is_no_choice(chosen):
    """Two tokens hold half each of what a third leaves; top_p lies within a rounding of a cut."""
    logits = np.full((ROWS, 4, VOCAB), -np.inf, np.float32)
    logits[..., :4] = 0.0
    seen = set()
    for seed in range(40):
        sampling = Sampling(temperature=1.0, top_p=0.75, seed=seed)
        history = History(np.zeros(3, np.int32), 1)
        rows = [replace(sampling, seed=seed * ROWS + row) for row in range(ROWS)]
        found = chosen(logits, rows, [history] * ROWS, np.ones(logits.shape, bool))
        wanted = [expected(logits[0, 0], s, history, (), np.ones(VOCAB, bool)) for s in rows]
        for token, host in zip(found[:, 0], wanted, strict=True):
            assert token in (host, NOTHING)
            seen.add(int(token))
    assert {NOTHING, 0, 1, 2} == seen


def test_the_largest_are_the_hosts():
    random = np.random.default_rng(1)
    values = np.round(random.normal(size=(50, 90)) * 4).astype(np.float32)
    values[::4] = random.normal(size=values[::4].shape)
    values[:, ::7] = -np.inf
    values[3] = -0.0
    counts = random.integers(1, 100, 50).astype(np.int32)
    found = np.asarray(jax.jit(_largest)(values, counts))
    for line, count, kept in zip(values, counts, found, strict=True):
        wanted = line.copy()
        _keep_largest(wanted, int(count))
        assert ((kept & (line > -np.inf)) == (wanted > -np.inf)).all()


def test_what_has_no_finite_logit_has_no_choice(chosen):
    logits = np.zeros((ROWS, 4, VOCAB), np.float32)
    logits[0, 0, 3], logits[1, 1, 650] = np.nan, np.inf
    sampling, history = Sampling(top_k=2, seed=1), History(np.zeros(2, np.int32), 1)
    found = chosen(logits, [sampling] * 4, [history] * 4, np.ones(logits.shape, bool))
    assert found[0, 0] == found[1, 1] == NOTHING
    assert (np.delete(found.ravel(), [0, 5]) >= 0).all()
