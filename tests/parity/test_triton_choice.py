"""The choosing kernel, interpreted on the CPU, against plain torch and the host's rule."""

import numpy as np
import torch

from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.torch.accept import NodeNoise, best
from forerun.speculative.accept import NOTHING
from tests.parity.interpreted import load
from tests.parity.test_choices import SEEDS, choices, nodes
from tests.twins.rounds import choose

choice = load("triton.triton_choice")


def noise_of(cases):
    return NodeNoise.of(nodes(cases), torch.device("cpu"))


def test_choices_are_the_hosts():
    random = np.random.default_rng(3)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(48)]
    for vocab in (320, 5000):  # One chunk, not full; two.
        logits = (random.normal(size=(48, vocab)) * 4).astype(np.float32)
        logits[::10] = np.round(logits[::10])  # Ties.
        logits = torch.from_numpy(logits)
        expected = choices(logits, cases).tolist()
        assert choose(logits, noise_of(cases)).tolist() == expected
        assert choice.choose(logits, noise_of(cases)).tolist() == expected
        assert len(set(expected)) > 20


def test_the_best_of_parts_is_that_of_the_whole():
    """Parts that begin anywhere in a block of the noise's generator; a part may have nothing."""
    random = np.random.default_rng(4)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 1.0][i % 2]) for i in range(12)]
    logits = (random.normal(size=(12, 4301)) * 4).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    logits[3, :2150] = -np.inf
    logits = torch.from_numpy(logits)
    expected, noise = choose(logits, noise_of(cases)), noise_of(cases)
    for work in (best, choice.best):
        for size in (2, 4):
            spans = [TensorParallel(rank, size).span(4301) for rank in range(size)]
            found = [work(logits[:, s].contiguous(), noise, s.start) for s in spans]
            scores, tokens = (torch.stack(each) for each in zip(*found, strict=True))
            assert tokens.gather(0, scores.argmax(0)[None])[0].tolist() == expected.tolist()
            assert scores[:, 3].isneginf().any() == (noise.temperatures[3] >= 0)


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
