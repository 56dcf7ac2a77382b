"""One suite for all executors: plain steps, trees, chunks and batches emit the same tokens.

torch, its captured rounds (on the recorder) and jax compute in float32 and must agree with each
other, too. cpu computes in the numbers of its files (Q8_0 here) and toy has its own model: they are
held to their own plain steps.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.errors import EngineError
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.jax import JaxExecutor, JaxOptions
from forerun.executors.torch import TorchExecutor, TorchPages
from forerun.executors.toy import ToyExecutor
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import NodeMasks
from tests.drafters.served import padded
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, chain_draft, emitted_within_a_page, limits
from tests.parity.tape import Tape, on_tape
from tests.parity.test_torch_invariance import half_true_draft

SMALL = limits(tiny.VOCAB, context=128, pages=40, max_nodes=128)
COUNT = 10
PROMPTS = [np.random.default_rng(n).integers(8, 250, n).tolist() for n in (30, 4, 17, 40)]
KINDS = ["toy", "torch", "rounds", "jax", pytest.param("cpu", marks=pytest.mark.skipif(
    bool(cpu.available()), reason="the compiled core is not built"))]  # fmt: skip


@pytest.fixture(scope="module")
def executor_of(checkpoint, compiled, quickly):
    """(kind) -> the executor of the model; (kind, of) -> its own, of that model or another."""
    tape = Tape()

    def made(kind, executor):
        if kind == "toy":
            return ToyExecutor(replace(SMALL, vocab=259))
        if kind == "jax":
            options = JaxOptions(draft_nodes=15, stacked=True, cache_dir=compiled)
            with pytest.MonkeyPatch.context() as patch:
                padded(patch, "rows", "chunks", "nodes")
                return JaxExecutor(executor, SMALL, options)
        if kind == "cpu":
            return CpuExecutor(executor, SMALL)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "rounds":
                on_tape(patch, tape)
            torch_one = TorchExecutor(executor, SMALL)
            torch_one = torch_one.capture() if kind == "rounds" else torch_one
        torch_one.pages = TorchPages(torch_one)
        return torch_one

    model = checkpoint("qwen3")
    shared = cache(lambda kind: made(kind, model))
    yield lambda kind, *of: made(kind, of[0] or model) if of else shared(kind)
    assert tape.replays > 5 or not tape.captures


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def executor(executor_of, kind):
    return executor_of(kind)


def emitted(executor, samplings, draft=None, chunk=None, count=COUNT, masks_of=None):
    """`count` tokens of each sequence, all in one batch; draft(slot, tokens so far) -> Draft."""
    with Driver(executor) as driver:
        for slot, sampling in enumerate(samplings):
            driver.open(slot, PROMPTS[slot], sampling)
        wanted = {slot: len(PROMPTS[slot]) + count for slot in range(len(samplings))}
        while left := [s for s in wanted if len(driver.sequences[s].tokens) < wanted[s]]:
            rows = []
            for slot in left:
                sequence = driver.sequences[slot]
                missing = len(sequence.tokens) - sequence.kv_len
                known = min(chunk or missing, missing)
                shall = draft is not None and known == missing
                given = draft(slot, sequence.tokens) if shall else None
                rows.append(Row(slot, known, given) if given is not None else Row(slot, known))
            driver.step(rows, masks_of)
        return [driver.sequences[s].tokens[len(PROMPTS[s]) : wanted[s]] for s in wanted]


def plain(temperature):
    return [Sampling(temperature=temperature, seed=(slot << 60) + 5) for slot in range(4)]


def judge_of(kind):
    """Whose plain steps an executor is held to."""
    return "torch" if kind in ("jax", "rounds") else kind


@pytest.fixture(scope="module")
def reference(executor_of):
    """What is said one token at a time."""

    @cache
    def build(kind, temperature):
        return emitted(executor_of(judge_of(kind)), plain(temperature))

    return build


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_plain_steps(executor, kind, reference, temperature):
    actual = emitted(executor, plain(temperature), chunk=7)
    assert actual == reference(kind, temperature)
    alone = emitted(executor, plain(temperature)[:1])
    assert alone == actual[:1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_continues_within_a_copied_page(executor, temperature):
    actual, expected = emitted_within_a_page(executor, PROMPTS[0], plain(temperature)[0])
    assert actual == expected


@pytest.mark.parametrize(
    ("shape", "temperature"), [("chains", 0.8), ("trees", 0.0), ("trees", 1.0)]
)
def test_drafts_change_no_token(executor, kind, reference, temperature, shape):
    expected, random = reference(kind, temperature), np.random.default_rng(1)
    accepted = []

    def draft(slot, tokens):
        extending = expected[slot][len(tokens) - len(PROMPTS[slot]) :]
        if shape == "trees":
            made, true = half_true_draft(random, extending, 250)
            accepted.append(any(true))
            return made
        right = int(random.integers(0, 4))
        accepted.append(bool(extending[:right]))
        return chain_draft([*extending[:right], *random.integers(8, 250, 2)])

    assert emitted(executor, plain(temperature), draft) == expected
    assert sum(accepted) > 10


def half_true(expected):
    """Draft tokens of which many are what is expected to come."""
    random = np.random.default_rng(2)

    def draft(slot, tokens):
        extending = expected[slot][len(tokens) - len(PROMPTS[slot]) :]
        return half_true_draft(random, extending, 250)[0]

    return draft


PARAMETERS = [
    Sampling(temperature=0.9, seed=1, top_k=5, logprobs=2),
    Sampling(temperature=1.1, seed=2, top_p=0.7, min_p=0.02),
    Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias=((9, 4.0),)),
    Sampling(temperature=1.0, seed=4, frequency_penalty=0.5, presence_penalty=0.2),
]


def test_every_sampling_parameter(executor, executor_of, kind):
    """Under trees, with rows of all kinds in one batch."""
    expected = emitted(executor_of(judge_of(kind)), PARAMETERS)
    assert emitted(executor, PARAMETERS, half_true(expected)) == expected


def test_accept_thresholds(executor, executor_of, kind):
    """With acc 0 whatever is possible passes, in a batch with lossless rows; torch and jax agree
    where the coin decides.
    """
    chain = [[113 + slot, 115, 114] for slot in range(4)]
    samplings = [replace(one, accept_threshold_acc=0.0) for one in plain(1.0)]
    samplings[2] = replace(samplings[2], accept_threshold_acc=1.0)
    expected = emitted(executor, plain(1.0), count=4)
    actual = emitted(executor, samplings, lambda slot, tokens: chain_draft(chain[slot]), count=4)
    for slot in (0, 1, 3):
        assert actual[slot][:3] == chain[slot]
    assert actual[2] == expected[2]
    coins = [replace(one, accept_threshold_acc=0.02) for one in plain(1.0)]

    def draft(slot, tokens):
        return as_draft([97 + (tokens[-1] * k) % 16 for k in (3, 5, 7, 11)], [-1, -1, 0, 0])

    texts = emitted(executor, coins, draft)
    assert texts != emitted(executor, plain(1.0), draft)
    assert texts == emitted(executor_of(judge_of(kind)), coins, draft)


def grammar(plan, trees):
    """Masks by position and parity: not the same for two nodes of a row."""
    vocab = np.arange(320)
    kinds = np.stack([(vocab % 3 != k) & (vocab < 250) for k in range(3)])
    bits = np.packbits(kinds, axis=1, bitorder="little").view(np.uint32)
    starts = np.repeat(plan.kv_len, np.diff(trees.start)) + trees.depth
    return NodeMasks(((starts + trees.tokens) % 3).astype(np.int32), bits)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_grammar_masks(executor, executor_of, kind, temperature):
    """The toy's vocabulary is another; tests/constrain hold it to grammars."""
    samplings = [*plain(temperature)[:3], replace(PARAMETERS[0], temperature=temperature)]
    judge = executor_of(judge_of(kind))
    expected = emitted(judge, samplings, masks_of=grammar)
    assert expected != emitted(judge, samplings)
    assert emitted(executor, samplings, half_true(expected), masks_of=grammar) == expected


def test_all_of_a_right_draft_is_accepted_and_what_was_there_before_leaves_no_trace(
    executor, kind, reference
):
    """Slots and pages that other texts had, draft tokens that were rejected: the step that verifies
    a whole answer says what plain steps said.
    """
    expected = reference(kind, 0.0)
    with Driver(executor, seed=4) as driver:
        for _ in range(3):
            driver.open(0, np.arange(10, 50), plain(0.0)[0])
            driver.step([Row(0, draft=chain_draft([9, 9, 9]))])
            driver.close(0)
        for slot, prompt in enumerate(PROMPTS):
            driver.open(slot, prompt, plain(0.0)[0])
        rows = [Row(slot, draft=chain_draft(expected[slot][:-1])) for slot in range(3)]
        outcome = driver.step(rows[:2]).outcome
        assert outcome.n_tokens.tolist() == [COUNT] * 2
        assert outcome.tokens.tolist() == expected[:2]
        assert driver.step(rows[2:]).outcome.tokens.tolist() == expected[2:3]


BROKEN = 7
"""A token whose embedding is NaN in the broken model."""


@pytest.fixture(scope="module")
def broken_of(tmp_path_factory, executor_of):
    hf = tiny.model("qwen3", max_position_embeddings=512)
    with torch.no_grad():
        hf.model.embed_tokens.weight[BROKEN] = torch.nan
    source = FolderCheckpoint(tiny.save_folder(hf, tmp_path_factory.mktemp("broken")))
    return lambda kind: executor_of(kind, source)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_row_that_is_not_finite_fails_alone(broken_of, kind):
    """And a broken draft token is only a wrong one."""
    broken, greedy, prompt = broken_of(kind), Sampling(temperature=0.0), PROMPTS[0][:9]
    with Driver(broken) as driver:
        driver.open(2, prompt, greedy)
        text = [driver.step([Row(2)]).emitted(0)[0] for _ in range(2)]
        driver.open(0, [*prompt, BROKEN], greedy)
        driver.open(1, prompt, greedy)
        outcome = driver.step([Row(0), Row(1)]).outcome
        assert outcome.finite.tolist() == [False, True]
        assert outcome.n_tokens.tolist() == [0, 1]
        # Its pages hold NaN; the sequence that gets them next does not see it.
        for slot in (0, 1, 2):
            driver.close(slot)
        driver.open(3, prompt, greedy)
        tree = as_draft([BROKEN, text[0], BROKEN, 5], [-1, -1, 1, 0])
        result = driver.step([Row(3, draft=tree)])
        assert result.outcome.finite.all()
        assert result.emitted(0) == text[:2]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_is_shut_down_runs_no_more(executor_of, kind):
    made = executor_of(kind, None)
    made.shutdown()
    made.shutdown()
    made.describe()
    driver = Driver(made)
    driver.open(0, PROMPTS[0])
    with pytest.raises(EngineError, match="shut down"):
        driver.step([Row(0)])
