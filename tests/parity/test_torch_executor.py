"""The torch executor's verbs: trees and plain steps agree, and nothing leaves a trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import ConfigError, EngineError, MemoryPlanError
from forerun.executors.torch import TorchExecutor
from forerun.interface.plan import Outcome
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.speculative.sampling import Sampling
from tests.models import tiny
from tests.parity.driver import EVERYTHING, Driver, Row, as_draft, chain_draft, limits

BROKEN = 7
"""A token whose embedding is NaN in the broken model."""


@pytest.fixture(scope="module")
def executor(checkpoint):
    return TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB))


@pytest.fixture
def prompt():
    return np.random.default_rng(6).integers(8, tiny.VOCAB, 30).tolist()


def greedy(executor, prompt, count, sampling=EVERYTHING):
    """`count` tokens, one a step."""
    with Driver(executor) as driver:
        driver.open(0, prompt, sampling)
        while len(driver.sequences[0].tokens) < len(prompt) + count:
            driver.step([Row(0)])
        return driver.sequences[0].tokens[len(prompt) :]


def test_greedy_text_is_that_of_transformers(checkpoint, executor, prompt):
    reference = tiny.reference(checkpoint("qwen2"))
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert greedy(executor, prompt, 12) == tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_steps_trees_and_prefill_give_the_same_tokens(executor, prompt, temperature):
    sampling = replace(EVERYTHING, temperature=temperature, seed=11)
    text = greedy(executor, prompt, 9, sampling)
    with Driver(executor) as driver:
        driver.open(0, prompt, sampling)
        # The truth in the tree, wrong draft tokens before, beside and below it.
        wrong = (text[0] + 1) % tiny.VOCAB
        tree = as_draft([wrong, text[0], 5, text[1], text[2], 9], [-1, -1, 1, 1, 3, 4])
        first = driver.step([Row(0, draft=tree)])
        assert first.emitted(0) == text[:4]
        second = driver.step([Row(0, draft=chain_draft([text[4], text[5]]))])
        assert second.emitted(0) == text[4:7]
        assert first.outcome.n_draft_tokens.tolist() == [6]
    for given in range(9):
        with Driver(executor) as driver:
            driver.open(0, prompt + text[:given], sampling, len(prompt))
            assert driver.step([Row(0)]).emitted(0) == text[given : given + 1]


def test_the_target_accepts_its_own_guesses_alone_and_in_a_batch(executor, prompt):
    prompts = [prompt[:length] for length in (30, 4, 17)]
    texts = [greedy(executor, p, 9) for p in prompts]
    with Driver(executor) as driver:
        for slot, tokens in enumerate(prompts):
            driver.open(slot, tokens)
        rows = [Row(slot, draft=chain_draft(text[:8])) for slot, text in enumerate(texts)]
        outcome = driver.step(rows).outcome
    assert outcome.n_tokens.tolist() == [9, 9, 9]
    assert outcome.tokens.tolist() == texts


def test_rejected_guesses_leave_no_trace(executor, prompt):
    text, results = greedy(executor, prompt, 6), []
    for noise in (0, 12):
        with Driver(executor) as driver:
            driver.open(0, prompt)
            for expected in text:
                wrong = [(expected + 1 + i) % tiny.VOCAB for i in range(noise)]
                result = driver.step([Row(0, draft=as_draft(wrong, np.arange(noise) // 3 - 1))])
                assert result.emitted(0) == [expected]
            results.append(result.logits(0, 0))
    assert torch.equal(*results)


def test_reused_slots_and_pages_leave_no_trace(checkpoint, prompt):
    small = TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB, pages=4, slots=1))
    fresh = greedy(small, prompt, 5)
    for token in range(10, 14):
        greedy(small, [token] * 40, 3)
    assert greedy(small, prompt, 5) == fresh


def broken_model(tmp_path):
    hf = tiny.model("llama", max_position_embeddings=512)
    with torch.no_grad():
        hf.model.embed_tokens.weight[BROKEN] = torch.nan
    return FolderCheckpoint(tiny.save_folder(hf, tmp_path))


def test_a_row_that_is_not_finite_fails_alone(tmp_path, prompt):
    broken = TorchExecutor(broken_model(tmp_path), limits(tiny.VOCAB))
    sampling = Sampling(temperature=0.0)
    text = greedy(broken, prompt, 3, sampling)
    with Driver(broken) as driver:
        driver.open(0, [*prompt, BROKEN], sampling)
        driver.open(1, prompt, sampling)
        outcome = driver.step([Row(0), Row(1)]).outcome
        assert outcome.finite.tolist() == [False, True]
        assert outcome.n_tokens.tolist() == [0, 1]
        # Its pages hold NaN now; whoever gets them next does not see it.
        driver.close(0)
        driver.open(2, prompt, sampling)
        assert driver.step([Row(2)]).emitted(0) == text[:1]


def test_a_broken_guess_is_only_a_wrong_guess(tmp_path, prompt):
    broken = TorchExecutor(broken_model(tmp_path), limits(tiny.VOCAB))
    sampling = Sampling(temperature=0.0)
    text = greedy(broken, prompt, 3, sampling)
    with Driver(broken) as driver:
        driver.open(0, prompt, sampling)
        tree = as_draft([BROKEN, text[0], 5, BROKEN], [-1, -1, 0, 1])
        outcome = driver.step([Row(0, draft=tree)])
        assert outcome.outcome.finite.all()
        assert outcome.emitted(0) == text[:2]


def test_log_probabilities_are_reported(executor, prompt):
    with Driver(executor) as driver:
        driver.open(0, prompt, replace(EVERYTHING, logprobs=3))
        result = driver.step([Row(0)])
    expected = result.logits(0, 29).double().log_softmax(-1)
    (report,) = result.outcome.logprobs[0]
    assert report.logprob == pytest.approx(float(expected.max()), abs=1e-6)
    assert [token for token, _ in report.top] == expected.topk(3).indices.tolist()
    assert len(result.outcome.prompt_logprobs[0]) == 29


def test_only_asked_nodes_are_scored(executor, prompt):
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
    found = []
    for each in (narrow, wide):
        with Driver(each) as driver:
            driver.open(0, prompt)
            driver.step([Row(0, known=20)])
            found.append(driver.step([Row(0)]).every())
    assert narrow.describe()["batch_invariant"] is False
    assert 0 < (found[0] - found[1]).std() < error * found[1].std()


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


def test_shutdown_is_final_and_idempotent(checkpoint, prompt):
    gone = TorchExecutor(checkpoint("qwen2"), limits(tiny.VOCAB))
    gone.open(SlotInit(0, TokenText(prompt), 30, EVERYTHING))
    gone.shutdown()
    gone.shutdown()
    driver = Driver(gone)
    driver.sequences[0] = type("", (), {"tokens": prompt, "kv_len": 0, "pages": []})()
    with pytest.raises(EngineError, match="shut down"):
        driver.step([Row(0)])
    assert gone.describe()["batch_invariant"] is False
