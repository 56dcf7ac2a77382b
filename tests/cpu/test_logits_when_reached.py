"""Logits of draft tokens that are computed when a path reaches them are those of a forward pass
that computes all, and so are the choices; those of others are not computed.
"""

import ctypes
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from forerun.executors.cpu import CpuExecutor
from forerun.hub.catalog import open_model
from forerun.speculative.sampling import Sampling
from tests.cpu.test_choice import random_masks
from tests.cpu.test_executor import Damaged
from tests.models import tiny
from tests.parity.driver import Driver, Row, chain_draft, limits, scored
from tests.parity.test_torch_invariance import half_true_draft

c_int32_p = ctypes.POINTER(ctypes.c_int32)
LANES = 4
"""kLanes of csrc/quant.h."""
PROMPT, OUTPUT = 11, 40
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=0.8, seed=6, top_k=5, logit_bias=((3, 0.5),)),
    Sampling(temperature=0.0, logprobs=2, prompt_logprobs=1),
)
"""The compiled core decides all but the third, the specification that."""


class AllExecutor(CpuExecutor):
    """Every scored node's logits are computed in the forward pass."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._buffers.step.logits_row = None


@pytest.fixture(scope="module")
def models(checkpoint):
    source = checkpoint("llama", "Q4_1")
    numbers = limits(tiny.VOCAB, page_size=4, pages=256)
    made = CpuExecutor(source, numbers, 2), AllExecutor(source, numbers, 1)
    yield made
    for each in made:
        each.shutdown()


@pytest.fixture(scope="module")
def texts(models):
    """Of each sampling a prompt and what plain decoding writes behind it, token by token."""
    random = np.random.default_rng(3)
    prompts = [random.integers(0, tiny.VOCAB, PROMPT) for _ in SAMPLINGS]
    with Driver(models[1]) as driver:
        for slot, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True)):
            driver.open(slot, prompt, sampling)
        for _ in range(OUTPUT):
            driver.step([Row(slot) for slot in range(len(SAMPLINGS))])
        return [driver.sequences[slot].tokens for slot in range(len(SAMPLINGS))]


def computed(executor) -> list[int]:
    """The scored nodes, by number, whose logits the last step has computed."""
    step = executor._buffers.step
    rows = np.ctypeslib.as_array(ctypes.cast(step.logits_row, c_int32_p), (step.scored,))
    return np.flatnonzero(rows >= 0).tolist()


def assert_same(one, other):
    for name in ("n_tokens", "tokens", "accepted", "finite"):
        np.testing.assert_array_equal(
            getattr(one.outcome, name), getattr(other.outcome, name), name
        )
    assert one.outcome.logprobs == other.outcome.logprobs
    assert one.outcome.prompt_logprobs == other.outcome.prompt_logprobs


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("masked", [False, True])
def test_choices_and_logits_are_those_of_a_pass_that_computes_all(models, texts, masked):
    random, accepted, saved = np.random.default_rng(7), 0, 0
    with Driver(models[0]) as reached, Driver(models[1]) as every:
        drivers = reached, every
        for slot, driver in product(range(4), drivers):
            driver.open(slot, texts[slot][:PROMPT], SAMPLINGS[slot])
        for _ in range(25):
            rows = []
            for slot in random.permutation(4)[: int(random.integers(1, 5))].tolist():
                done = reached.sequences[slot].tokens
                true = texts[slot][len(done) :] if done == texts[slot][: len(done)] else []
                rows.append(Row(slot, draft=half_true_draft(random, true, tiny.VOCAB)[0]))
            _, trees = reached.plan(rows)
            masks = random_masks(random, len(trees.tokens), tiny.VOCAB) if masked else None
            one, other = (
                driver.step(rows, None if masks is None else lambda *_, masks=masks: masks)
                for driver in drivers
            )
            assert_same(one, other)
            accepted += len(one.outcome.accepted)
            saved += len(scored(models[0])) - len(computed(models[0]))
            for node in scored(models[0]):
                np.testing.assert_array_equal(
                    *(executor._logits_of(node) for executor in models[:2])
                )
            failed = [row.slot for row, ok in zip(rows, one.outcome.finite, strict=True) if not ok]
            for slot, driver in product(failed, drivers):
                driver.close(slot)
                driver.open(slot, texts[slot][:PROMPT], SAMPLINGS[slot])
    assert accepted > 10 and saved > 50


def rows_computed(executor, texts, slot, true, false) -> int:
    """Of a step whose chain is so many of the tokens that plain decoding writes, then others."""
    with Driver(executor) as driver:
        driver.open(0, texts[slot][:PROMPT], SAMPLINGS[slot])
        driver.step([Row(0)])
        ahead = np.array(texts[slot][PROMPT + 1 :])
        ahead[true:] = (ahead[true:] + 1) % tiny.VOCAB
        result = driver.step([Row(0, draft=chain_draft(ahead[: true + false]))])
        assert result.outcome.n_tokens[0] == true + 1
        return len(computed(executor))


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_what_no_path_reaches_is_not_computed(models, texts, slot):
    """The root's column at first; then a column more for every path that goes on behind it, of
    twice as many nodes each time.
    """
    assert rows_computed(models[0], texts, slot, 0, 30) == LANES
    assert rows_computed(models[0], texts, slot, LANES - 1, 30) == LANES
    assert rows_computed(models[0], texts, slot, LANES, 30) == 2 * LANES
    assert rows_computed(models[0], texts, slot, 30, 0) == 31
    assert rows_computed(models[0], texts, slot, 0, 2) == 3


@pytest.mark.model
def test_of_a_large_output_matrix_as_many_as_pay_are_computed_at_once():
    """That depends on times, so now and then more; choices do not."""
    model = open_model("smollm2-135m")
    vocab, prompt = model.architecture.vocab, [9, 8, 7, 6, 5]
    numbers, greedy = limits(vocab, page_size=4, pages=64), Sampling(temperature=0.0)
    made = CpuExecutor(model.checkpoint, numbers, 2), AllExecutor(model.checkpoint, numbers, 2)
    with Driver(made[1]) as driver:
        driver.open(0, prompt, greedy)
        text = [int(driver.step([Row(0)]).emitted(0)[0]) for _ in range(60)]
    with Driver(made[0]) as reached, Driver(made[1]) as every:
        for driver in (reached, every):
            driver.open(0, prompt, greedy)
        done, counts = 0, []
        while done < 40:
            true = len(counts) % 9
            ahead = np.array(text[done : done + 12])
            ahead[true:] = (ahead[true:] + 1) % vocab
            row = Row(0, draft=chain_draft(ahead)) if done else Row(0)
            one, other = reached.step([row]), every.step([row])
            assert_same(one, other)
            counts.append(len(computed(made[0])))
            assert counts[-1] >= min(one.outcome.n_tokens[0], len(scored(made[0])))
            done += int(one.outcome.n_tokens[0])
    for each in made:
        each.shutdown()
    assert max(counts) > LANES


def test_a_row_that_the_specification_decides_has_all(models, texts):
    assert rows_computed(models[0], texts, 2, 1, 20) == 22


def test_room_for_logits_doubles(models, texts):
    """New memory for one row more each time would make every such step twice as long."""
    seen = set()
    with Driver(models[0]) as driver:
        models[0].release_scratch()
        driver.open(0, texts[0][:PROMPT], SAMPLINGS[0])
        driver.step([Row(0)])
        for count in range(1, 17):
            driver.step([Row(0, draft=chain_draft(np.full(count, 3)))])
            seen.add(models[0]._buffers.step.logits)
    assert len(seen) <= 5


def test_rows_share_a_column(models, texts):
    """Of four rows the roots; where two paths go on, of each as many nodes as the column holds."""
    with Driver(models[0]) as driver:
        for slot in range(4):
            driver.open(slot, texts[slot % 2][:PROMPT], SAMPLINGS[slot % 2])
        driver.step([Row(slot) for slot in range(4)])
        ahead = [np.array(texts[slot % 2][PROMPT + 1 :][:6]) for slot in range(4)]
        for slot in (1, 3):
            ahead[slot] = (ahead[slot] + 1) % tiny.VOCAB
        for slot in (0, 2):
            ahead[slot][1:] = (ahead[slot][1:] + 1) % tiny.VOCAB
        result = driver.step([Row(slot, draft=chain_draft(ahead[slot])) for slot in range(4)])
        assert result.outcome.n_tokens.tolist() == [2, 1, 2, 1]
        assert computed(models[0]) == [0, 1, 2, 7, 14, 15, 16, 21]


class Poisoned(Damaged):
    """The embedding of token `culprit` is not finite, so nothing is behind it."""

    def packed(self, name):
        matrix = self._whole.packed(name)
        if name != "model.embed_tokens.weight":
            return matrix
        rows = matrix.rows.copy()
        rows.view("<f4")[self._culprit] = np.nan
        return replace(matrix, rows=rows)


@pytest.mark.parametrize("reached", [True, False])
def test_logits_that_are_not_finite_end_a_path_that_comes_there(checkpoint, reached):
    """What is accepted before is emitted, and the next step, whose root they are, fails."""
    source, numbers = checkpoint("llama", None), limits(tiny.VOCAB)
    whole = CpuExecutor(source, numbers, 1)
    with Driver(whole) as driver:
        driver.open(0, [1, 2, 3], SAMPLINGS[0])
        text = [driver.step([Row(0)]).emitted(0)[0] for _ in range(6)]
    whole.shutdown()
    bad = text[4] if reached else (text[4] + 1) % tiny.VOCAB
    assert bad not in (1, 2, 3, *text[:4])
    for kind in (CpuExecutor, AllExecutor):
        made = kind(Poisoned(source, bad), numbers, 1)
        with Driver(made) as driver:
            driver.open(0, [1, 2, 3], SAMPLINGS[0])
            driver.step([Row(0)])
            drafted = driver.step([Row(0, draft=chain_draft([*text[1:4], bad]))])
            following = driver.step([Row(0)]).outcome
        made.shutdown()
        assert drafted.emitted(0) == text[1:5] and drafted.outcome.finite[0]
        assert following.finite[0] != reached
