"""What is particular to the torch executor: what it scores, describes and refuses, other dtypes,
other devices. What every executor keeps: test_executors.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.errors import ConfigError, EngineError, MemoryPlanError
from forerun.executors.torch import TorchExecutor
from forerun.interface.plan import Outcome
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import EVERYTHING, Driver, Row, as_draft, limits, logits_in_chunks


@pytest.fixture(scope="module")
def executor(checkpoint):
    return TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB))


@pytest.fixture
def prompt():
    return np.random.default_rng(6).integers(8, tiny.VOCAB, 30).tolist()


def test_log_probabilities_are_reported(executor, prompt):
    with Driver(executor) as driver:
        driver.open(0, prompt, replace(EVERYTHING, logprobs=3))
        result = driver.step([Row(0)])
    expected = result.logits(0, 29).double().log_softmax(-1)
    (report,) = result.outcome.logprobs[0]
    assert report.logprob == pytest.approx(float(expected.max()), abs=1e-6)
    assert [token for token, _ in report.top] == expected.topk(3).indices.tolist()
    assert len(result.outcome.prompt_logprobs[0]) == 29


def test_only_wanted_nodes_are_scored(executor, prompt):
    with Driver(executor) as driver:
        driver.open(0, prompt, Sampling(temperature=0.0))
        assert driver.step([Row(0, known=20)]).round.logits.shape == (0, tiny.VOCAB)
        tree = driver.step([Row(0, draft=as_draft([5, 6], [-1, -1]))])
        assert tree.round.logits.shape == (3, tiny.VOCAB)


def test_describe_counts_what_is_there(checkpoint):
    tied = TorchExecutor(checkpoint("llama", tie_word_embeddings=True), limits(tiny.VOCAB))
    buffers = tied.describe()
    assert buffers["device"] == "cpu"
    assert buffers["dtype"] == "float32"
    assert buffers["batch_invariant"] is True
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert buffers["weight_bytes"] == 4 * (2 * 320 * 64 + 2 * layer + 64)
    assert buffers["cache_bytes"] == 4 * 2 * 2 * 2 * 16 * (96 * 16 + 384 + 1)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_narrow_dtypes_run_and_say_that_bits_may_depend_on_the_batch(
    checkpoint, prompt, dtype, error
):
    narrow = TorchExecutor(checkpoint("qwen3"), limits(tiny.VOCAB), dtype=dtype)
    wide = TorchExecutor(checkpoint("qwen3"), limits(tiny.VOCAB))
    logits = [logits_in_chunks(each, prompt, (20, None))[20:] for each in (narrow, wide)]
    assert narrow.describe()["batch_invariant"] is False
    assert 0 < (logits[0] - logits[1]).std() < error * logits[1].std()


def test_the_forward_pass_and_commit_stay_on_the_device(checkpoint, prompt):
    """The meta device has shapes and no numbers: a tensor left on the CPU is an error there."""
    away = TorchExecutor(checkpoint("qwen3"), limits(tiny.VOCAB), "meta", "bfloat16")
    away.request_aux_hidden_states((1, 2))
    with Driver(away) as driver:
        driver.open(0, prompt)
        plan, trees = driver.plan([Row(0, draft=as_draft([5, 6, 7], [-1, -1, 1]))])
        scores = away.begin(plan, trees)
        assert scores.logits.device.type == "meta"
        assert scores.logits.shape == (4, tiny.VOCAB)
        assert scores.reported.device.type == "meta" and scores.reported.shape == (29, 64)
        streams = scores.features.tensor()
        assert streams.device.type == "meta" and streams.shape == (33, 128)
        one = np.ones(1, np.int32)
        outcome = Outcome(2 * one, 5 * one[:, None], 3 * one, one == 1, accepted=30 * one)
        away.keep(scores, outcome, np.zeros(1, int), scores.places)


def test_what_it_refuses(checkpoint, executor, prompt):
    whole = checkpoint("qwen2")
    with pytest.raises(MemoryPlanError, match=r"cache 8,796,\d.* bytes do not fit .*kv-tokens"):
        TorchExecutor(whole, limits(tiny.VOCAB, pages=1 << 30))
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        TorchExecutor(whole, limits(tiny.VOCAB), dtype="int3")
    with pytest.raises(ConfigError, match="no device 'abacus'"):
        TorchExecutor(whole, limits(tiny.VOCAB), device="abacus")
    with pytest.raises(ConfigError, match="vocabulary is 5, the model's 320"):
        TorchExecutor(whole, limits(5))
    with pytest.raises(ConfigError, match="context is 1024, the model was made for 512"):
        TorchExecutor(whole, limits(tiny.VOCAB, context=1024))
    with pytest.raises(ConfigError, match=r"outside 0\.\.2"):
        executor.request_aux_hidden_states((0, 3))
    with Driver(executor) as driver:
        driver.open(0, prompt * 20)
        plan, trees = driver.plan([Row(0)])
        with pytest.raises(EngineError, match="a step of 600 nodes; at most 384 fit"):
            executor.begin(plan, trees)
        plan, trees = driver.plan([Row(0, known=20)])
        plan.page_table[:] = -1
        with pytest.raises(EngineError, match="no page"):
            executor.begin(plan, trees)
