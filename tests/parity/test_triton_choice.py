"""The choosing kernel, interpreted on the CPU, against plain torch and the host's rule."""

import numpy as np
import pytest
import torch

from forerun.executors.torch.accept import Likely, NodeNoise, choices, choose, pick
from forerun.speculative.accept import NOTHING
from forerun.speculative.noise import gumbel_of
from tests.parity.interpreted import load
from tests.parity.test_torch_accept import SEEDS, nodes

choice = load("triton_choice")


def noise_of(cases):
    seeds, positions, heats = zip(*cases, strict=True)
    return NodeNoise(
        torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(heats),
    )


def test_choices_are_the_hosts():
    random = np.random.default_rng(3)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(48)]
    for vocab in (320, 5000):  # One chunk, not full; two.
        logits = (random.normal(size=(48, vocab)) * 4).astype(np.float32)
        logits[::10] = np.round(logits[::10])  # Ties.
        logits = torch.from_numpy(logits)
        expected = choices(logits, nodes(cases)).tolist()
        assert choose(logits, noise_of(cases)).tolist() == expected
        assert choice.choose(logits, noise_of(cases)).tolist() == expected
        assert len(set(expected)) > 20


def test_ties_go_to_the_lowest_id_and_trouble_to_nothing():
    logits = torch.zeros(5, 4200)
    logits[0, [3, 7, 4150]] = 2.0
    logits[1, 4] = torch.nan
    logits[2, 4199] = torch.inf
    logits[3] = -torch.inf
    logits[4, :4199] = -torch.inf
    for temperature in (0.0, 1.0):
        for work in (choose, choice.choose):
            found = work(logits, noise_of([(5, 1, temperature)] * 5)).tolist()
            assert found[1:] == [NOTHING, NOTHING, NOTHING, 4199]
            assert temperature or found[0] == 3


def likely(nodes, count, seed):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(nodes, 500, generator=random) * 3
    best, which = logits.topk(count, -1)
    ids = torch.randperm(9000, generator=random)[:500].int()
    return Likely(best, which, logits.logsumexp(-1), ids)


@pytest.mark.parametrize(("count", "width"), [(64, 1), (64, 4), (40, 16), (3, 3)])
def test_children_are_picked_as_on_the_host(count, width):
    """The plain twin by the host's own noise, the kernel by the twin."""
    cases = [(SEEDS[i % 6], 10 * i, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(24)]
    found = likely(24, count, count)
    tokens, values = pick(found, noise_of(cases), width)
    kernel = choice.pick(found, noise_of(cases), width)
    assert kernel[0].tolist() == tokens.tolist()
    torch.testing.assert_close(kernel[1], values, rtol=1e-5, atol=1e-5)
    for node, (seed, position, temperature) in enumerate(cases):
        ids = found.ids[found.which[node]].numpy()
        scores = (found.logits[node] - found.normaliser[node]).numpy()
        if temperature:
            scores = scores / np.float32(temperature) + gumbel_of(seed, position, ids)
            scores -= np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        order = np.argsort(-scores, kind="stable")[:width]
        assert tokens[node].tolist() == ids[order].tolist()
        np.testing.assert_allclose(values[node], scores[order], rtol=1e-4, atol=1e-5)


def test_broken_children_are_worth_nothing():
    found = likely(4, 8, 1)
    found.logits[0, 2] = torch.nan
    found.logits[1] = torch.nan
    found.normaliser[2] = torch.nan
    for work in (pick, choice.pick):
        tokens, values = work(found, noise_of([(5, 1, 0.0)] * 4), 8)
        assert values[0, 7] == -torch.inf and values[0, :7].isfinite().all()
        assert (values[1:3] == -torch.inf).all()
        assert values[3].isfinite().all() and set(tokens[3].tolist()) <= set(found.ids.tolist())
