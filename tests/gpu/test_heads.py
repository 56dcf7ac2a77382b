"""A draft head on CUDA: the head that was trained, and the acceptance that was simulated."""

from contextlib import closing

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.executors.torch import TorchEagleModel, TorchExecutor
from tests.models import tiny
from tests.parity.driver import limits
from tests.parity.heads import (
    SWITCHES,
    RandomHead,
    Target,
    compare,
    counted,
    learn,
    opened,
    serve,
    simulated,
    within,
)
from tests.worlds.answers import drafting


@pytest.fixture(scope="module")
def dense(folder):
    return Target(FolderCheckpoint(folder("llama", layers=6)))


@pytest.fixture(scope="module")
def learned(dense, tmp_path_factory):
    return learn(dense, tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize("changes", SWITCHES)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-3), ("bfloat16", 0.08)])
def test_passes_are_those_of_one_token_at_a_time(dense, device, tmp_path, changes, dtype, error):
    executor = TorchExecutor(dense.checkpoint, limits(tiny.VOCAB), device, dtype)
    compare(RandomHead(dense, tmp_path, changes), executor, within(error), TorchEagleModel)


def test_served_acceptance_is_the_simulated_one(learned, folder, device):
    dense_head, texts = learned
    with closing(opened(folder("llama", layers=6), dense_head, device)) as target:
        prompts = list(texts[:, :12])
        plain = serve(target, prompts, "OFF")
        served = serve(target, prompts)
    assert [item.tokens for item in served] == [item.tokens for item in plain]
    expected = np.zeros(4, int)
    for prompt, item in zip(prompts, served, strict=True):
        expected += simulated(dense_head, np.concatenate([prompt, item.tokens]), len(prompt))
    # A near-tie of the draft may fall the other way on another device.
    assert np.abs(np.array(counted(served)) - expected).sum() <= 0.02 * expected.sum()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 7, 1), (15, 4, 4)])
def test_drafting_in_rounds_is_that_of_single_passes(learned, folder, device, shape, temperature):
    """Accepted draft tokens, of texts that are the same; near-ties of the draft are forgiven."""
    dense_head, texts = learned
    runs = []
    for eager in (False, True):
        many = {"chunked_prefill_size": 256, "disable_cuda_graph": eager}
        with closing(opened(folder("llama", layers=6), dense_head, device, **many)) as target:
            prompts = list(texts[:4, :12])
            served = serve(target, prompts, "EAGLE", 40, temperature, **drafting(*shape))
            sizes = target.executor.describe().get("captured", ())
        drafted = any(levels for _, _, levels, *_ in sizes)
        assert drafted == (device == "cuda" and not eager)
        runs.append(served)
    carried, alone = runs
    assert sum(a.tokens == b.tokens for a, b in zip(carried, alone, strict=True)) >= 3
    accepted = [sum(item.stats.accepted for item in staging) for staging in runs]
    assert abs(accepted[0] - accepted[1]) <= 0.05 * accepted[1]
