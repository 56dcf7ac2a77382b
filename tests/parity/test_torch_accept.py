"""The device's choices are the host's: same noise, same argmax, same refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.executors.device_choice import PlainNodes
from forerun.executors.host_sampler import HostSampler
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.accept import choices, gumbel
from forerun.speculative import noise
from forerun.speculative.accept import NOTHING, choose
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits

CPU = torch.device("cpu")
SEEDS = [0, 1, 0xFFFFFFFF, 1 << 32, 0x123456789ABCDEF0, (1 << 64) - 1]


def nodes(cases):
    """PlainNodes of (seed, position, temperature)."""
    seeds, positions, heats = zip(*cases, strict=True)
    return PlainNodes(
        np.arange(len(cases), dtype=np.int32),
        np.array(seeds, np.uint64),
        np.array(positions, np.int32),
        np.array(heats, np.float32),
    )


@pytest.mark.parametrize("vocab", [1, 6, 320, 49152])
def test_noise_is_the_hosts(vocab):
    positions = np.array([0, 1, 7, 4095, 131071, 2], np.int32)
    found = gumbel(np.array(SEEDS, np.uint64), positions, vocab, CPU).numpy()
    for line, seed, position in zip(found, SEEDS, positions, strict=True):
        expected = noise.gumbel(seed, int(position), vocab)
        # Two libraries' float64 logarithms may differ in the last bit: then float32 may, too.
        assert np.abs(line.view(np.int32) - expected.view(np.int32)).max() <= 1
        assert (line != expected).sum() <= 1


def test_choices_are_the_hosts():
    random = np.random.default_rng(3)
    cases = [(SEEDS[i % 6], i // 3, [0.0, 0.3, 1.0, 1.7][i % 4]) for i in range(150)]
    logits = (random.normal(size=(150, 1000)) * 4).astype(np.float32)
    logits[::10] = np.round(logits[::10])  # Ties.
    found = choices(torch.from_numpy(logits), nodes(cases)).tolist()
    for line, (seed, position, temperature), token in zip(logits, cases, found, strict=True):
        scaled = line if temperature in (0.0, 1.0) else line / np.float32(temperature)
        assert token == choose(scaled, Sampling(temperature=temperature, seed=seed), position)
    assert len(set(found)) > 50


def test_ties_go_to_the_lowest_id_and_trouble_to_nothing():
    logits = torch.zeros(5, 9)
    logits[0, [3, 7]] = 2.0
    logits[1, 4] = torch.nan
    logits[2, 8] = torch.inf
    logits[3] = -torch.inf
    logits[4, :8] = -torch.inf
    for temperature in (0.0, 1.0):
        found = choices(logits, nodes([(5, 1, temperature)] * 5)).tolist()
        assert found[1:] == [NOTHING, NOTHING, NOTHING, 8]
        assert temperature or found[0] == 3


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
