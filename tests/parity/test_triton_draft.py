"""The kernels beside a draft head in a round, interpreted on the CPU, against plain torch and the
host's rule.
"""

import numpy as np
import pytest
import torch

from forerun.executors.torch.decoder.elementwise import PLAIN, rotation
from forerun.executors.torch.triton.round_types import Accepted, Extended, Levels, Prepared
from forerun.speculative.noise import gumbel_of
from forerun.speculative.tree import full_size
from tests.covering import every, some_of
from tests.parity.interpreted import load
from tests.references.rounds import children, descend, follow, grow
from tests.worlds.choices import SEEDS, noise_of

draft = load("triton.triton_draft")

GROWN = [
    *((1, 1, 1, 500, hot) for hot in (True, False)),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in ((4, 3, 1, 500, False), (2, 3, 4, 4500, True), (3, 2, 2, 500, True))
    ),
]
"""Triton's interpreter takes two seconds for what orders the candidates of one node."""


def below(rows, width, vocab, seed, hot=True):
    """Logits of the nodes that ask at every level, and how their children choose."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(9000, generator=random)[:vocab].int()
    for level in range(4):
        count = rows * (width if level else 1)
        logits = torch.randn(count, vocab, generator=random) * 3
        # Of bfloat16's many ties at the last candidate plain torch takes any.
        logits = logits if hot else logits.bfloat16()
        cases = [
            (SEEDS[i % 6], 10 * i + level, [0.0, 0.3, 1.0, 1.7][i % 4] if hot else 0.0)
            for i in range(count)
        ]
        yield ids, logits, noise_of(cases)


@pytest.mark.parametrize(("rows", "levels", "width", "vocab", "hot"), GROWN)
def test_levels_are_grown_as_in_plain_torch(rows, levels, width, vocab, hot):
    size, places = Levels(levels, width), full_size(width, levels)
    actual, expected = torch.full((2, 3, rows, places), -9, dtype=torch.int32)
    given = below(rows, width, vocab, rows, hot)
    for level, (ids, logits, noise) in zip(range(levels), given, strict=False):
        chosen = None
        if level and width > 1:
            chosen = torch.arange(width).flip(0).sort().values.expand(rows, -1).contiguous()
        for work, out in ((draft.grow, actual), (grow, expected)):
            work(logits, ids, noise, size, level, out, chosen)
    assert torch.equal(actual[1], expected[1])
    values = [each[2].view(torch.float32) for each in (actual, expected)]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
    assert not hot or torch.equal(actual[0], expected[0])
    assert (values[0] <= 0).all() and not (actual == -9).any()


@pytest.mark.slow
def test_the_children_are_the_hosts():
    ids, logits, noise = next(below(24, 1, 500, 7))
    logits = logits.float() + torch.randn(24, 500) * 1e-3  # No ties.
    for width in (1, 4, 16):
        grown = torch.zeros(3, 24, width, dtype=torch.int32)
        draft.grow(logits, ids, noise, Levels(1, width), 0, grown, None)
        for node in range(24):
            temperature, scores = noise.temperatures[node].item(), logits[node].log_softmax(-1)
            best = scores.topk(64).indices
            scores = scores[best].numpy()
            if temperature:
                seed = int(np.int64(noise.seeds[node]).view(np.uint64))
                position = int(noise.positions[node])
                scores = scores / np.float32(temperature)
                scores = scores + gumbel_of(seed, position, ids[best].numpy())
                scores -= np.log(np.exp(scores - scores.max()).sum()) + scores.max()
            order = np.argsort(-scores, kind="stable")[:width]
            assert grown[0, node].tolist() == ids[best][order].tolist()
            values = grown[2, node].view(torch.float32).numpy()
            np.testing.assert_allclose(values, np.minimum(scores[order], 0), rtol=1e-4, atol=1e-4)


def test_broken_children_are_worth_nothing():
    ids, logits, noise = next(below(4, 8, 500, 1, hot=False))
    logits = logits.float()
    logits[0, 2], logits[1], logits[2, 7] = torch.nan, torch.nan, torch.inf
    for work in (grow, draft.grow):
        grown = torch.zeros(3, 4, 8, dtype=torch.int32)
        work(logits, ids, noise, Levels(1, 8), 0, grown, None)
        values = grown[2].view(torch.float32)
        assert (values[:3] == -torch.inf).all() and values[3].isfinite().all()
        assert set(grown[0, 3].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("width", [1, 4])
def test_children_that_depend_on_what_stands_above(width):
    """Of three nodes in each of two rows, one greedy; some candidates are none, or not finite."""
    random = torch.Generator().manual_seed(width)
    scores = torch.randn(6, 11, generator=random) * 3
    scores[1, 4], scores[4, 2:] = torch.nan, -torch.inf
    ids = torch.randint(0, 9000, (2, 11), generator=random, dtype=torch.int32)
    given = (
        scores,
        ids,
        torch.tensor([-1.5, -torch.inf]),
        noise_of([(SEEDS[0], 5, 0.0), (SEEDS[1], 9, 0.7)]),
    )
    (actual, values), (wanted, worth) = (work(*given, width) for work in (draft.children, children))
    there = worth > -torch.inf
    assert torch.equal(actual[there], wanted[there])
    torch.testing.assert_close(values, worth, rtol=1e-4, atol=1e-4)
    assert there[0].all() and there[4].sum() == min(width, 2)


@pytest.mark.parametrize("width", [40, 0, 2100])
def test_the_rows_ends_are_followed(width):
    """Also where nothing, or more than was read, goes to the next step."""
    random = torch.Generator().manual_seed(0)
    rows, nodes, hidden = 3, 4, 40
    total = rows * nodes
    accepted = Accepted(
        choices=torch.zeros(total, dtype=torch.int32),
        on_path=torch.zeros(rows, nodes, dtype=torch.bool),
        count=torch.tensor([1, 3, 0], dtype=torch.int32),
        last=torch.tensor([0, 3, 0], dtype=torch.int32),
    )
    nothing = torch.zeros(total, dtype=torch.int32)
    noise = noise_of([(SEEDS[i % 6], 7 * i, 0.1 * i) for i in range(total)])
    prepared = Prepared(nothing, nothing, nothing, noise, ())
    facts = {
        "draft_slot": torch.tensor([2, -1, 0], dtype=torch.int32),
        "kv_len": torch.tensor([5, 900, 0], dtype=torch.int32),
    }
    read = torch.randn(total, hidden, generator=random).bfloat16()
    passed = torch.randn(total, width, generator=random).bfloat16()
    for size in (Levels(1, 1), Levels(3, 1), Levels(3, 4)):
        results = []
        for work in (draft.follow, follow):
            outputs = torch.zeros(11, width).bfloat16()
            extended = Extended(read, passed, outputs, 7)
            made = work(extended, accepted, prepared, facts, size)
            outputs[-1] = 0  # Of no row.
            results.append((made, outputs))
        (one, its), (other, others) = results
        assert torch.equal(its, others) and its[9].any() == its[7].any() == (width > 0)
        for name in ("read", "hidden", "kv_len", "position"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert len(one.noise) == len(other.noise) == size.levels
        for mine, theirs in zip(one.noise, other.noise, strict=True):
            for name in ("seeds", "positions", "temperatures"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("shape", "roots", "passed"),
    some_of(every([(1, 2, 2), (3, 5, 4), (2, 4, 3), (2, 3, 8)], [False, True], [0, 40, 1100])),
)
def test_frontiers_are_those_of_plain_torch(shape, roots, passed):
    """Nodes that go on, what they receive and their ancestors, level by level; many values are
    equal.
    """
    rows, levels, width = shape
    random = torch.Generator().manual_seed(levels)
    size, places = Levels(levels, width), full_size(width, levels)
    grown = torch.randint(0, 9000, (3, rows, places), generator=random, dtype=torch.int32)
    values = -torch.randint(0, 4, (rows, places), generator=random).float()
    values[values < -2] = -torch.inf
    grown[2] = values.view(torch.int32)
    frontiers = [None, None]
    for level in range(1, levels):
        count = rows * (width if level > 1 else 1)
        # A slice of something wider, as a model may give it.
        hidden = torch.randn(count, passed + 8, generator=random).bfloat16()[:, :passed]
        frontiers = [
            work(grown, size, level, hidden, None if before is None else before.above, roots)
            for work, before in zip((draft.descend, descend), frontiers, strict=True)
        ]
        actual, expected = frontiers
        for name in ("chosen", "tokens", "hidden", "above", "tree_intervals"):
            one, other = getattr(actual, name), getattr(expected, name)
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert torch.equal(one, other) and one.is_contiguous(), name
    assert actual.tree_intervals.max() == width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_first", [False, True])
def test_what_a_draft_model_reads_is_joined(dtype, hidden_first):
    embedding, width = torch.randn(50, 96).to(dtype), 96
    tokens = torch.tensor([3, 0, 49, 7], dtype=torch.int32)[1:]
    hidden = torch.randn(3, 2 * width).to(dtype)[:, 10 : 10 + width] * 5
    norms = torch.rand(2, width).unbind()
    inputs = embedding, hidden, norms, 1e-5, hidden_first
    expected = PLAIN.draft_inputs(tokens, *inputs)
    for kind in (torch.int32, torch.int64):
        actual = draft.draft_inputs(tokens.to(kind), *inputs)
        assert (actual.dtype, actual.shape) == (dtype, (3, 2 * width))
        error = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(actual, expected, **error)
    normed = PLAIN.norm(hidden, norms[1], 1e-5)
    beside = expected[:, :width] if hidden_first else expected[:, width:]
    assert torch.equal(beside, normed)


def test_positions_are_turned():
    positions, frequencies = torch.tensor([0, 1, 77, 4000]).int(), torch.logspace(0, -4, 20)
    for actual, expected in zip(
        draft.rotation(positions, frequencies, 1.2),
        rotation(positions, frequencies, 1.2),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
