"""All sampling parameters in programs of torch, by references and interpreted kernels, and of XLA:
the host's choice, or none where top_p leaves it open on XLA; the host's reports.
"""

from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from forerun.executors.device_choice import CUT_OFFS, Choosing
from forerun.executors.host_choice import report
from forerun.executors.jax.network.attention import ancestors
from forerun.executors.jax.rounds.accept import NodeSampling, Trees
from forerun.executors.jax.rounds.batches import Batch, Bucket
from forerun.executors.jax.rounds.shaping import (
    JaxShaping,
    _largest,
    choose_shaped,
    edits_of,
    packed_shaping,
    room_for_edits,
)
from forerun.executors.torch.accept import NodeNoise
from forerun.executors.torch.captured.shaped_rows import ShapedRows
from forerun.executors.torch.shaping import RULES, reported
from forerun.executors.torch.sizes import Size
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.accept import NOTHING
from forerun.speculative.accept import choose as chosen_by_rule
from forerun.speculative.sampling import History, Sampling, _keep_largest, process
from forerun.speculative.tree import NodeMasks
from forerun.speculative.verify import intervals
from tests.parity.driver import SHAPED
from tests.parity.interpreted import load
from tests.parity.tape import Watch
from tests.references.kernels import REFERENCE_KERNELS
from tests.worlds.choices import packed

VOCAB, ROWS, NODES, TURNS = 700, 4, 4, 18
KINDS = [
    {"presence_penalty": 1.5, "temperature": 0.3},
    {"frequency_penalty": 0.8, "temperature": 0.3},
    {"repetition_penalty": 1.1, "temperature": 0.3},
    *SHAPED,
]
TOKENS, PARENTS = [7, 5, 9, 5], np.array([-1, 0, 1, 2], np.int32)
PATHS = [(), (5,), (5, 9), (5, 9, 5)]
EDITS = room_for_edits(ROWS, 128, VOCAB)
KERNELS = replace(
    REFERENCE_KERNELS,
    choose=load("triton.triton_choice").choose,
    shape=load("triton.triton_shaping").shaped,
)


def bits_of(allowed):
    """uint32[R*N,W]"""
    return packed(allowed.reshape(ROWS * NODES, VOCAB))


# --- torch ---------------------------------------------------------------------------------------


def made(samplings):
    """ShapedRows in which slot n asks for samplings[n]."""
    none = np.zeros(ROWS, np.int32)
    kinds = (np.bool_, np.float32, np.uint64, np.int32, CUT_OFFS)
    choosing = Choosing(*(np.zeros(ROWS, kind) for kind in kinds))
    rows = ShapedRows(ROWS, VOCAB, torch.device("cpu"), choosing)
    for slot, sampling in enumerate(samplings):
        rows.open(SlotInit(slot, TokenText(none), len(none), sampling))
    return rows


def buffers_of(rows, size, samplings, masks):
    slots = np.arange(ROWS, dtype=np.int32)
    words = -(-VOCAB // 32)
    arrays = {name: np.zeros(ROWS, np.int32) for name in RULES}
    arrays |= {
        "mask_row": np.full(size.total, -1, np.int32),
        "masks": np.zeros((size.total, words), np.int32),
        "slot": slots,
        "tokens": np.tile(np.array(TOKENS, np.int32), ROWS),
        "tree_intervals": np.tile(intervals(PARENTS)[:, None], (1, ROWS, 1)).reshape(2, -1),
        "temperature": np.array([s.temperature for s in samplings], np.float32).view(np.int32),
    }
    rows.fill(arrays, size, slots, masks, np.arange(size.total))
    return {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in arrays.items()}


def on_torch(logits, samplings, histories, allowed, kernels=REFERENCE_KERNELS):
    """Launches only."""
    rows, masks = made(samplings), None
    if allowed is not None:
        masks = NodeMasks(np.arange(ROWS * NODES, dtype=np.int32), bits_of(allowed))
    slots = np.arange(ROWS, dtype=np.int32)
    size = rows.size(Size(ROWS, NODES), slots, masks is not None)
    first = rows.stale(slots, lambda slot: (samplings[slot], histories[slot]))
    if first is not None:
        first()
    buffers = buffers_of(rows, size, samplings, masks)
    depth = np.tile(np.arange(NODES), ROWS)
    noise = NodeNoise(
        torch.tensor([s.seed for s in samplings]).repeat_interleave(NODES),
        torch.from_numpy(np.repeat([h.output_len for h in histories], NODES) + depth).int(),
        torch.tensor([s.temperature for s in samplings]).repeat_interleave(NODES),
    )
    # A kernel that is interpreted waits.
    with Watch() if kernels is REFERENCE_KERNELS else nullcontext():
        choices = rows.choose(size, buffers, torch.from_numpy(logits).flatten(0, 1), noise, kernels)
    return choices.view(ROWS, NODES).numpy()


def on_triton(logits, samplings, histories, allowed):
    with np.errstate(invalid="ignore"):
        return on_torch(logits, samplings, histories, allowed, KERNELS)


# --- XLA -----------------------------------------------------------------------------------------


@jax.jit
def _run(logits, sampling, trees, whole, allowed):
    return choose_shaped(logits, sampling, trees, JaxShaping.of(whole, ROWS, EDITS), allowed)


def on_xla(logits, samplings, histories, allowed):
    size = Bucket(ROWS, NODES)
    every = Trees(
        np.tile(np.array(TOKENS, np.int32), (ROWS, 1)),
        np.tile(PARENTS, (ROWS, 1)),
        ancestors(np.repeat(intervals(PARENTS)[:, None], ROWS, 1)),
        np.ones(size, bool),
    )
    dispatch = Batch(size, False, tuple(range(ROWS)), (), ())
    fields = {
        row: (sampling, edits_of(sampling, history))
        for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True))
    }
    whole = packed_shaping(dispatch, fields, EDITS, VOCAB)
    seeds = np.repeat([[s.seed & 0xFFFFFFFF for s in samplings], [0] * ROWS], NODES, 1)
    lengths = np.repeat([h.output_len for h in histories], NODES)
    sampling = NodeSampling(
        seeds.astype(np.uint32),
        (lengths + np.tile(np.arange(NODES), ROWS)).astype(np.int32),
        np.repeat([np.float32(s.temperature) for s in samplings], NODES),
    )
    allowed = np.ones(logits.shape, bool) if allowed is None else allowed
    return np.asarray(_run(logits, sampling, every, whole, allowed))


# --- all ----------------------------------------------------------------------------------------


CHOSEN = {"torch": on_torch, "triton": on_triton, "jax": on_xla}
"""(logits [R,N,V], samplings, histories, allowed [R,N,V] or None) -> int32[R,N]."""


def wanted_of(logits, sampling, history, path, mask):
    processed = process(logits, sampling, history, path, mask)
    return chosen_by_rule(processed, sampling, history.output_len + len(path))


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("program", CHOSEN)
def test_choices_are_the_hosts(program, masked):
    """Of every kind of row, at four nodes each that add draft tokens to what was said."""
    random, compared, unsure = np.random.default_rng(0), 0, 0
    turns = 6 if program == "triton" else TURNS  # Nearly every kind of row, interpreted.
    for turn in range(turns):
        samplings = [
            Sampling(
                **{"temperature": 0.9, "seed": 10 * turn + row}
                | KINDS[(turn + 3 * row) % len(KINDS)]
            )
            for row in range(ROWS)
        ]
        histories = [
            History(random.integers(0, 14, 20).astype(np.int32), int(random.integers(5, 18)))
            for _ in range(ROWS)
        ]
        logits = (random.normal(size=(ROWS, NODES, VOCAB)) * 3).astype(np.float32)
        # At every second node what was said is all that is likely: penalties decide.
        logits[:, ::2, :12] = random.normal(size=(ROWS, NODES // 2, 12)) + 12
        if turn % 3 == 0:
            logits = np.round(logits)  # Ties.
        allowed = random.random((ROWS, NODES, VOCAB)) < 0.3 if masked else None
        if masked:
            allowed[0] = False
            allowed[0][:, [9, 11]] = True  # Stop tokens alone.
            allowed[1, 2] = False
        bits = bits_of(allowed) if masked else [None] * (ROWS * NODES)
        choices = CHOSEN[program](logits, samplings, histories, allowed)
        for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
            for node, path in enumerate(PATHS):
                mask, token = bits[NODES * row + node], choices[row, node]
                wanted = wanted_of(logits[row, node], sampling, history, path, mask)
                compared += 1
                if program == "jax" and token == NOTHING and wanted != NOTHING:
                    assert sampling.top_p < 1
                    unsure += 1
                else:
                    assert token == wanted, (sampling, node)
    assert compared == turns * ROWS * NODES and unsure < compared / 100


@pytest.mark.parametrize("program", CHOSEN)
def test_what_has_no_finite_logit_has_no_choice(program):
    """Nor where a grammar hides it."""
    logits = np.zeros((ROWS, NODES, VOCAB), np.float32)
    logits[0, 0, 3], logits[1, 1, 650] = np.nan, np.inf
    sampling, history = Sampling(top_k=2, seed=1), History(np.zeros(2, np.int32), 1)
    allowed = np.ones(logits.shape, bool)
    allowed[..., [3, 650]] = False
    for mask in (None, allowed):
        choices = CHOSEN[program](logits, [sampling] * ROWS, [history] * ROWS, mask)
        assert choices[0, 0] == choices[1, 1] == NOTHING
        assert (np.delete(choices.ravel(), [0, 5]) >= 0).all()


@pytest.mark.parametrize("program", CHOSEN)
def test_min_p_leaves_what_is_just_that_likely(program):
    """Half of the tokens are a hundredth of its logarithm above it, half as much below."""
    logits = np.zeros((ROWS, NODES, VOCAB), np.float32)
    logits[..., 1::2], logits[..., 2::2] = np.log(0.2) * 0.99, np.log(0.2) * 1.01
    samplings = [Sampling(min_p=0.2, seed=seed) for seed in range(ROWS)]
    choices = CHOSEN[program](logits, samplings, [History(np.zeros(2, np.int32), 1)] * ROWS, None)
    assert set(choices.ravel() % 2) == {1} and len(set(choices.ravel())) > ROWS


# --- on torch alone ------------------------------------------------------------------------------


def test_rounds_count_what_they_emit():
    """A history is written once; afterwards it is what it would be if written anew."""
    sampling = Sampling(repetition_penalty=1.3, stop_tokens=(4,), logit_bias=((2, 1.0), (3, 2.0)))
    rows, random = made([sampling] * ROWS), np.random.default_rng(1)
    histories = [History(random.integers(0, 9, 12).astype(np.int32), 5) for _ in range(ROWS)]
    slots = np.arange(ROWS, dtype=np.int32)
    rows.stale(slots, lambda slot: (sampling, histories[slot]))()
    choices = random.integers(0, 9, (ROWS, NODES)).astype(np.int32)
    kept = np.arange(NODES) < np.array([[1], [4], [0], [2]])
    rows.add(
        {"slot": torch.from_numpy(slots)},
        torch.from_numpy(choices).flatten(),
        torch.from_numpy(kept),
    )
    moved = [
        History(np.append(text.tokens, said[mine]).astype(np.int32), 5)
        for text, said, mine in zip(histories, choices, kept, strict=True)
    ]
    for slot, text in enumerate(moved):
        rows.set_counted(slot, len(text.tokens))
    assert rows.stale(slots, lambda slot: (sampling, moved[slot])) is None
    anew = made([sampling] * ROWS)
    anew.stale(slots, lambda slot: (sampling, moved[slot]))()
    assert torch.equal(rows._history[:ROWS], anew._history[:ROWS])
    assert torch.equal(rows._bias, anew._bias) and rows._bias[0, 3] == 2.0
    # A slot that is taken again knows nothing of before.
    rows.open(SlotInit(1, TokenText(slots), 4, Sampling(repetition_penalty=1.3)))
    rows.stale(slots, lambda slot: (Sampling(repetition_penalty=1.3), histories[slot]))()
    assert not rows._bias[1].any()


@pytest.mark.parametrize("top", [1, 5, 20])
def test_reports_are_the_hosts(top):
    logits = np.random.default_rng(2).normal(size=(6, VOCAB)).astype(np.float32) * 4
    logits[1] = np.round(logits[1])
    logits[2, 5:] = -np.inf
    choices = torch.tensor([3, 600, 4, 0, 699, 1], dtype=torch.int32)
    with Watch():
        actual = reported(torch.from_numpy(logits), choices, top).numpy()
    for line, token, mine in zip(logits, choices.tolist(), actual, strict=True):
        wanted = report(line, token, top)
        own, ids, others = mine[:1], mine[1 : 1 + top], mine[1 + top :].view(np.float32)
        assert own.view(np.float32)[0] == pytest.approx(wanted.logprob, abs=1e-5)
        possible = others > -np.inf
        assert ids[possible].tolist() == [token for token, _ in wanted.top]
        np.testing.assert_allclose(others[possible], [v for _, v in wanted.top], atol=1e-5)


# --- on XLA alone --------------------------------------------------------------------------------


def test_where_top_p_is_a_matter_of_rounding_there_is_no_choice():
    """Two tokens hold half each of what a third leaves; top_p lies within a rounding of a cut."""
    logits = np.full((ROWS, 4, VOCAB), -np.inf, np.float32)
    logits[..., :4] = 0.0
    seen = set()
    for seed in range(40):
        sampling = Sampling(temperature=1.0, top_p=0.75, seed=seed)
        history = History(np.zeros(3, np.int32), 1)
        rows = [replace(sampling, seed=seed * ROWS + row) for row in range(ROWS)]
        actual = on_xla(logits, rows, [history] * ROWS, None)
        wanted = [wanted_of(logits[0, 0], s, history, (), None) for s in rows]
        for token, host in zip(actual[:, 0], wanted, strict=True):
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
    actual = np.asarray(jax.jit(_largest)(values, counts))
    for line, count, kept in zip(values, counts, actual, strict=True):
        wanted = line.copy()
        _keep_largest(wanted, int(count))
        assert ((kept & (line > -np.inf)) == (wanted > -np.inf)).all()
