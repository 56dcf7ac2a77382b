"""Two ranks or four write what one process writes without speculation: every draft method, trees
and chains, a grammar, mixed parameters, alone and in batches that are preempted.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.model_runner import TorchOptions
from forerun.executors.torch.parallel.executor import ParallelExecutor
from forerun.networks.arch import FAMILIES
from forerun.speculative.sampling import Sampling
from tests.covering import covering, every, values
from tests.e2e.drafts import METHODS, make
from tests.e2e.test_equality_matrix import TRIALS, configured, hinted, proved
from tests.models import tiny
from tests.parity.driver import Driver, Row, limits


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def on_ranks(made, method, monkeypatch, **shares):
    """Prove that no answer depends on drafting: a cell of tests/e2e/test_equality_matrix.py."""
    config, hints = configured(made, method, "torch", **shares), hinted(monkeypatch)
    for trial, *cell in zip(TRIALS.values(), (0.0, 0.8), ("chain", "tree"), strict=True):
        proved(config, replace(trial, tokens=10, temperatures=cell[:1]), hints, cell[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "size"), covering(every(METHODS, [2, 4]), values))
def test_every_draft_method(made, monkeypatch, method, size):
    on_ranks(made, method, monkeypatch, tp_size=size)


# --- two ranks write what one process writes, whatever the layers are ----------------------------


UNABLE = ("olmo2", "olmo3", "minimax_m2", "gemma4_text")
ABLE = [name for name in FAMILIES if name not in UNABLE]
"""OLMo and MiniMax norm their queries over all heads at once; Gemma 4 has caches by layer."""
FAST = ("deepseek_v3", "gpt_oss", "qwen3_5_text")


def texts(executor, vocab):
    """A greedy text and a sampled one, of 12 tokens each; and their log-probabilities."""
    random, tokens, logprobs = np.random.default_rng(1), [], []
    with Driver(executor) as driver:
        for slot, temperature in enumerate((0.0, 1.0)):
            sampling = Sampling(temperature=temperature, seed=slot, logprobs=2)
            driver.open(slot, random.integers(0, vocab, 30 + slot), sampling)
        for _ in range(12):
            step = driver.step([Row(0), Row(1)])
            tokens.append((step.emitted(0), step.emitted(1)))
            logprobs += [e.logprob for row in step.outcome.logprobs for e in row]
    return tokens, logprobs


def same_texts(checkpoint, way):
    """Ranks and one process write the same; what the ranks say of themselves."""
    arch = checkpoint.architecture
    room = replace(limits(arch.vocab), context=min(256, arch.context))
    shared = ParallelExecutor(checkpoint, room, TorchOptions(), way, threads=1)
    try:
        tokens, logprobs = texts(shared, arch.vocab)
        about = shared.describe()
    finally:
        shared.shutdown()
    expected, of_one = texts(TorchExecutor(checkpoint, room), arch.vocab)
    assert tokens == expected
    np.testing.assert_allclose(logprobs, of_one, atol=1e-4)
    return about


@pytest.mark.parametrize(
    "family",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ABLE],
)
def test_every_family_writes_the_same(tmp_path, family):
    checkpoint = FolderCheckpoint(tiny.save_folder(tiny.model(family), tmp_path))
    same_texts(checkpoint, TensorParallel(0, 2))
