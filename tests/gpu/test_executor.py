"""The torch executor on CUDA against the same executor on the CPU, and against itself."""

from contextlib import closing

import numpy as np
import pytest
import torch

from forerun.build.target import open_target
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.accept import gumbel
from forerun.measure.prove import Trial, prove
from forerun.measure.workload import Prompt
from forerun.options.config import EngineConfig
from forerun.speculative import noise
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import EVERYTHING, Driver, Row, as_draft, limits
from tests.worlds.choices import MIXED, POSITIONS, SEEDS, choices, noise_of, text

TOLERANCE = {"float32": 2e-3, "bfloat16": 6e-2}
"""Norm of the difference over the norm, logits of a tiny model; float32 allows for tf32."""


def all_logits(executor, prompt, tree):
    with Driver(executor) as driver:
        driver.open(0, prompt, EVERYTHING)
        driver.step([Row(0, known=len(prompt) // 2)])
        result = driver.step([Row(0, draft=tree)])
        count = len(prompt) - len(prompt) // 2 + len(tree)
        return torch.stack([result.logits(0, node).cpu() for node in range(count)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_chunks_and_trees_are_the_cpus(checkpoint, device, family, dtype):
    prompt = np.random.default_rng(1).integers(8, tiny.VOCAB, 150).tolist()
    tree = as_draft([5, 6, 7, 8, 9], [-1, -1, 0, 2, 1])
    actual, expected = (
        all_logits(TorchExecutor(checkpoint(family), limits(tiny.VOCAB), *how), prompt, tree)
        for how in ((device, dtype), ("cpu", "float32"))
    )
    assert torch.isfinite(actual).all()
    assert (actual - expected).norm() / expected.norm() < TOLERANCE[dtype]


def test_noise_and_choices_are_the_hosts(device):
    where = torch.device(device)
    made = noise_of([(*each, 1.0) for each in zip(SEEDS, POSITIONS, strict=True)], where)
    actual = gumbel(made.seeds, made.positions.long(), 49152).cpu().numpy()
    expected = np.stack(
        [noise.gumbel(s, int(p), 49152) for s, p in zip(SEEDS, POSITIONS, strict=True)]
    )
    assert np.abs(actual.view(np.int32) - expected.view(np.int32)).max() <= 1
    cases = [(SEEDS[i % 6], i, [0.0, 0.7, 1.0][i % 3]) for i in range(90)]
    logits = torch.randn(90, 5000, generator=torch.Generator().manual_seed(2)) * 4
    logits[5, 77] = torch.nan
    logits[6, 78] = torch.inf
    assert choices(logits, cases, where).tolist() == choices(logits, cases).tolist()


def test_text_in_float32_is_the_cpus(checkpoint, device):
    made = [TorchExecutor(checkpoint(), limits(tiny.VOCAB), d, "float32") for d in (device, "cpu")]
    there, here = (text(executor, MIXED) for executor in made)
    same = sum(a == b for a, b in zip(there, here, strict=True))
    assert same >= len(MIXED) - 1, "more than one near-tie among four short texts"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_token_in_float32(folder, device, temperature):
    config = EngineConfig(
        model=str(folder()),
        executor="torch",
        device=device,
        dtype="float32",
        policy="fixed",
        max_sequences=4,
        kv_tokens=2048,
    )
    with closing(open_target(config)) as target:
        prompts = tuple(
            Prompt(str(i), "words", ({"role": "user", "content": f"the quick fox {i} " * 6},))
            for i in range(4)
        )
        trial = Trial(prompts, tokens=24, temperatures=(temperature,), group=4, seed=1)
        proof = prove(target, target.config, trial, lambda *_: None)
        assert all(run.divergence is None for run in proof.runs), proof
        assert proof.holds or temperature > 0, "nothing was accepted, so nothing is proved"


def test_many_rounds_leave_no_memory_behind(checkpoint, device):
    executor = TorchExecutor(checkpoint(), limits(tiny.VOCAB), device).capture()
    used = []
    for _ in range(6):
        with Driver(executor) as driver:
            driver.open(0, [5, 6, 7], Sampling(temperature=0.8, seed=1))
            for _ in range(40):
                driver.step([Row(0)])
        used.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    assert used[-1] == used[1]
