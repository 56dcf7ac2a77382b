"""Two ranks decide what one process decides: every sampling parameter, trees, log-probabilities."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.errors import EngineError
from forerun.executors.torch import TorchExecutor
from forerun.executors.torch.model_runner import TorchOptions
from forerun.executors.torch.parallel.executor import ParallelExecutor
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from tests.covering import spread
from tests.models import tiny
from tests.parity.driver import SHAPED, Driver, Row, emitted_within_a_page, limits

VOCAB = 323
"""Not divisible: ranks' parts of embedding and head differ by one token."""
LIMITS = replace(limits(VOCAB), context=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    hf = tiny.model("llama", vocab_size=VOCAB)
    return FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def alone(checkpoint):
    return TorchExecutor(checkpoint, LIMITS)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(checkpoint, request):
    """Of four ranks two share a key/value head."""
    executor = ParallelExecutor(
        checkpoint, LIMITS, TorchOptions(), TensorParallel(0, request.param), threads=1
    )
    yield executor
    executor.shutdown()


def tree(random, right):
    """A tree of seven draft tokens whose first path is what is likely to be right."""
    tokens = random.integers(0, VOCAB, 7).astype(np.int32)
    tokens[: len(right)] = right
    return Draft(tokens, np.array([-1, 0, 1, -1, 0, 3, 3], np.int32))


def texts(executor, sampling, drafts=None):
    """Of three sequences in 8 steps, one of them in two chunks: tokens, and what is reported of
    them: ids, and log-probabilities.
    """
    random, emitted, logprobs = np.random.default_rng(3), [], []
    with Driver(executor) as driver:
        for slot, length in enumerate((5, 40, 23)):
            prompt = random.integers(0, VOCAB, length)
            driver.open(slot, prompt, replace(sampling, seed=slot + 1))
        driver.step([Row(1, known=17)])
        for number in range(8):
            right = [drafts[number + 1][slot][:1] for slot in range(3)] if drafts else None
            rows = [
                Row(slot, draft=tree(random, right[slot])) if right else Row(slot)
                for slot in range(3)
            ]
            step = driver.step(rows)
            reports = step.outcome.logprobs, step.outcome.prompt_logprobs
            entries = [entry for part in reports for row in part for entry in row]
            ids = [(entry.token, [token for token, _ in entry.top]) for entry in entries]
            emitted.append([*(step.emitted(slot) for slot in range(3)), ids])
            logprobs += [entry.logprob for entry in entries]
            logprobs += [value for entry in entries for _, value in entry.top]
    return emitted, logprobs


def same(shared, alone, sampling, drafts=None):
    """Whether the ranks say what one process says."""
    (actual, logprobs), (expected, of_one) = (
        texts(executor, sampling, drafts) for executor in (shared, alone)
    )
    np.testing.assert_allclose(logprobs, of_one, atol=1e-4)
    return actual == expected


@pytest.mark.parametrize("parameters", spread(SHAPED, 8), ids=lambda one: " ".join(one) or "plain")
def test_every_parameter_decides_the_same(alone, shared, parameters):
    """Each with a temperature, unless it is greedy."""
    parameters = {k: v for k, v in parameters.items() if k != "logit_bias"} | (
        {"logit_bias": ((9, 4.0), (5, -100.0), (300, 7.25))} if "logit_bias" in parameters else {}
    )
    sampling = Sampling(**parameters)
    assert same(shared, alone, sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_made_of_parts(alone, shared, temperature):
    sampling = Sampling(temperature=temperature, logprobs=4, prompt_logprobs=2)
    assert same(shared, alone, sampling)


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 3}])
def test_trees_are_verified_the_same(alone, shared, parameters):
    """What is accepted is copied into pages on every rank: later tokens see it."""
    sampling = Sampling(**parameters)
    plain, _ = texts(alone, sampling)
    assert same(shared, alone, sampling, [*plain, plain[0], plain[0]])


def test_ranks_copy_a_page_after_what_was_accepted_in_it(shared):
    prompt = np.random.default_rng(5).integers(0, VOCAB, 30)
    actual, expected = emitted_within_a_page(shared, prompt, Sampling(temperature=0.8, seed=2))
    assert actual == expected


def test_what_is_refused_leaves_all_ranks_in_step(alone, shared):
    """A step that is too large is refused before anybody hears of it."""
    with Driver(shared) as driver:
        driver.open(0, np.arange(8), Sampling(temperature=0.0))
        plan, trees = driver.plan([Row(0)])
        short = replace(plan, page_table=np.full_like(plan.page_table, -1))
        with pytest.raises(EngineError, match="page"):
            shared.begin(short, trees)
    sampling = Sampling(temperature=0.0)
    assert same(shared, alone, sampling)


def test_ranks_are_described(shared):
    said = shared.describe()
    assert said["tp_size"] == len(said["ranks"]) + 1
    assert [rank["device"] for rank in said["ranks"]] == ["cpu"] * len(said["ranks"])
